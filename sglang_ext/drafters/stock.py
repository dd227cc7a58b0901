"""Stock EAGLE-3 checkpoints (`LlamaForCausalLMEagle3`), which SGLang serves without rayspec.

Their head is a matrix over `draft_vocab_size` tokens: `lm_head.weight` [S, H], `d2t` int64 [S] with the target id of
row i at i + d2t[i], and `t2d` bool [V] that marks the kept tokens. In our names that is a head of kind `full`, or of
kind `truncated` with `lm_head.ids`. S = kept tokens, H = hidden, V = vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

STOCK_ARCHITECTURE = "LlamaForCausalLMEagle3"


def from_stock(tensors: Mapping[str, Tensor], *, vocab_size: int, path: str) -> dict[str, Tensor]:
    """Our names and tensors for stock ones. Raises ValueError for maps that contradict each other or the shapes."""
    ours = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d", "embed_tokens.weight")}
    d2t = tensors.get("d2t")
    size = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocab_size
    if d2t is None:
        if size < vocab_size:
            raise ValueError(f"{path}: lm_head.weight has {size} rows of {vocab_size}, but no d2t says of which tokens")
        return ours
    if tuple(d2t.shape) != (size,):
        raise ValueError(f"{path}: d2t has shape {list(d2t.shape)}, lm_head.weight {size} rows; they must agree")
    ids = d2t.long() + torch.arange(size)
    if len(ids.unique()) != size or not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ValueError(f"{path}: d2t (offsets: target id = i + d2t[i]) must name distinct ids in 0..{vocab_size - 1}")
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), _mask(ids, vocab_size)):
        raise ValueError(f"{path}: t2d must be true exactly at the tokens that d2t names")
    if size == vocab_size:
        if bool(d2t.any()):
            raise ValueError(f"{path}: d2t must be all zeros where draft_vocab_size equals vocab_size")
        return ours
    return ours | {"lm_head.ids": ids}


def stock_shapes(shapes: Mapping[str, list[int]], vocab_size: int) -> dict[str, list[int]]:
    """The shapes that `from_stock` will give, from the stored ones."""
    ours = {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d", "embed_tokens.weight")}
    if "d2t" in shapes and list(shapes["d2t"]) != [vocab_size]:
        ours["lm_head.ids"] = shapes["d2t"]
    return ours


def stock_config(config: Mapping[str, Any], path: object) -> dict[str, Any]:
    """config.json of the stock form. Raises ValueError for a head that it cannot express."""
    head = config["draft_head"]
    if head["kind"] not in ("full", "truncated") or head.get("step_sizes"):
        raise ValueError(
            f"not saving {path}: a stock EAGLE-3 checkpoint can hold a full head, or a truncated one of one size, "
            f"not {head}; serve it with rayspec's own form"
        )
    stock = {key: value for key, value in config.items() if key not in ("draft_head", "rayspec")}
    size = head.get("size", config["vocab_size"])
    return stock | {"architectures": [STOCK_ARCHITECTURE], "draft_vocab_size": size}


def to_stock(tensors: Mapping[str, Tensor], *, vocab_size: int) -> dict[str, Tensor]:
    """Stock names for a drafter whose head is `full`, or `truncated` at every step alike."""
    stock = {name: t for name, t in tensors.items() if name != "lm_head.ids"}
    ids = tensors.get("lm_head.ids")
    if ids is None:
        ids = torch.arange(vocab_size)
    return stock | {"d2t": ids - torch.arange(len(ids)), "t2d": _mask(ids, vocab_size)}


def _mask(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
