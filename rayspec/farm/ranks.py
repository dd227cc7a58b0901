"""How many GPUs an engine runs on."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

FLAGS = {"tp_size": "tensor-parallel-size", "pp_size": "pipeline-parallel-size", "dp_size": "data-parallel-size"}


def ranks_of(flags: Mapping[str, Any], words: Sequence[str] = ()) -> int:
    """The GPUs of an engine with these ServerArgs fields, over which `words` for SGLang's command line win. Under
    `enable_dp_attention` the data-parallel ranks are the tensor-parallel ones; without it each has an engine's."""
    said = {**flags, **_said(words)}
    names = [name for name in FLAGS if not (name == "dp_size" and said.get("enable_dp_attention"))]
    return prod(int(said.get(name) or 1) for name in names)


def _said(words: Sequence[str]) -> dict[str, Any]:
    """What words that SGLang's parser takes say of these fields."""
    parser = ArgumentParser(add_help=False)
    for name, alias in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{alias}", type=int)
    parser.add_argument("--enable-dp-attention", action="store_true", default=None)
    known, _ = parser.parse_known_args(list(words))
    return {name: value for name, value in vars(known).items() if value is not None}
