"""Stock checkpoints, which SGLang serves without rayspec.

EAGLE-3's (`LlamaForCausalLMEagle3`) are read and written. Their head is a matrix over `draft_vocab_size` tokens:
`lm_head.weight` [S, H], `d2t` int64 [S] with the target id of row i at i + d2t[i], and `t2d` bool [V] that marks the
kept tokens; where all are kept, the matrix alone. Read, that is a head of kind `full`, or of kind `truncated` with
`lm_head.ids`; written is any head that is one matrix (`DraftHead.as_matrix`).
EAGLE-1 and 2's (`LlamaForCausalLMEagle`) are written. They hold a body alone: SGLang gives it the target's LM head.
S = kept tokens, H = hidden, V = vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_ext.drafters.target import TAPS, stored_taps
from sglang_ext.heads import DraftHead

STOCK_ARCHITECTURE = "LlamaForCausalLMEagle3"
EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"


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


def stock_names(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The names, shapes and dtypes that `from_stock` will give; values are not looked at."""
    ours = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d", "embed_tokens.weight")}
    if "d2t" in tensors and list(tensors["d2t"].shape) != [vocab_size]:
        ours["lm_head.ids"] = tensors["d2t"]
    return ours


def stock_matrix(head: DraftHead, path: object) -> tuple[Tensor, Tensor]:
    """(matrix [S, H], target ids [S]) of a head. Raises ValueError for one that the stock form cannot express."""
    matrix = head.as_matrix()
    if matrix is None:
        raise ValueError(
            f"{path}: a stock EAGLE-3 checkpoint holds one matrix for every draft step (a full head, a truncated one "
            f"of one size, a slimspec one multiplied out), not {head.spec()}; serve it with rayspec"
        )
    weight_SH, ids = matrix
    return weight_SH, torch.arange(head.config.vocab_size) if ids is None else ids


def check_target_head(head: Mapping[str, Any], provenance: Mapping[str, Any], path: object) -> None:
    """Raise ValueError unless a drafter's head is the target's own, the only one that EAGLE's stock form has."""
    if dict(head) != {"kind": "full"} or provenance.get("freeze_head") is not True:
        raise ValueError(
            f"{path}: SGLang gives a stock EAGLE drafter the target's LM head, and this one has its own, {dict(head)}; "
            "train it with freeze_head: true and draft_head: {kind: full}, or serve it with rayspec"
        )


def stock_config(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """config.json of EAGLE-3's stock form, for a head of so many rows, from ours.

    The tapped layers are named twice: SGLang counts the layer whose output it taps, in `eagle_config`; vLLM reads the
    same key as the layer whose input it taps, of `eagle_config` only where the config itself has none.
    """
    named = {"architectures": [STOCK_ARCHITECTURE], "draft_vocab_size": rows, TAPS: stored_taps(config)}
    return _without_ours(config) | named


def eagle_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of EAGLE's stock form, from ours."""
    return _without_ours(config) | {"architectures": [EAGLE_ARCHITECTURE]}


def _without_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("draft_head", "rayspec")}


def to_stock(body: Mapping[str, Tensor], weight_SH: Tensor, ids_S: Tensor, *, vocab_size: int) -> dict[str, Tensor]:
    """The tensors of the stock form, for a body and what `stock_matrix` gave. A head of all tokens comes without maps:
    vLLM refuses them there, and SGLang needs none."""
    ids_S = ids_S.cpu()
    d2t_S = ids_S - torch.arange(len(ids_S))
    maps = {"d2t": d2t_S, "t2d": _mask(ids_S, vocab_size)} if len(ids_S) < vocab_size or d2t_S.any() else {}
    return {**body, "lm_head.weight": weight_SH, **maps}


def _mask(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
