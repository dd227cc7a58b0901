"""The weights of a stock EAGLE-3 drafter, which SGLang's own class takes whatever their numbers are."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from sglang_ext.drafters.numbers import check_finite, kind_of_numbers


def check_numbers(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
    """AROUND LlamaForCausalLMEagle3.load_weights. Raises ValueError for NaN, Inf, and integers where numbers are
    computed with."""
    return original(model, _checked(weights, getattr(model.config, "_name_or_path", "")))


def _checked(weights: Iterable[tuple[str, Tensor]], path: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name not in ("d2t", "t2d") and kind_of_numbers(tensor.dtype) == "integers":
            raise ValueError(
                f"drafter {path}: {name} holds {tensor.dtype}, expected floating-point numbers; copy the drafter whole"
            )
        check_finite({name: tensor}, path)
        yield name, tensor
