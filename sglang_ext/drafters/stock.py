"""Stock checkpoints, which SGLang serves without rayspec.

EAGLE-3's (`LlamaForCausalLMEagle3`) are read and written. Their head is a matrix over `draft_vocab_size` tokens:
`lm_head.weight` [S, H], `d2t` int64 [S] with the target id of row i at i + d2t[i], and `t2d` bool [V] that marks the
kept tokens; where all are kept, the matrix alone. Read, that is a head of kind `full`, or of kind `truncated` with
`lm_head.ids`; written is any head that is one matrix (`DraftHead.as_matrix`).
EAGLE-1 and 2's (`LlamaForCausalLMEagle`) are written. They hold a body alone: SGLang gives it the target's LM head.
A family that has such a form names it as `stock` of its config. S = kept tokens, H = hidden, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ext.drafters.target import TAPS, stored_taps
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads

Head = DraftHead | PositionHeads


@dataclass(frozen=True)
class StockForm(ABC):
    """How SGLang stores the drafters of a family. `vllm_method`: what vLLM's `--speculative-config` calls them, None
    where it does not serve them; `version`: of what is written, None where it never changed."""

    architecture: str
    vllm_method: str | None = None
    version: int | None = None

    @abstractmethod
    def matrix(self, head: Head, provenance: Mapping[str, Any], where: object) -> tuple[Tensor, Tensor] | None:
        """(matrix [S, H], target ids [S]) of what is stored of a head; None where nothing is. Raises ValueError for a
        head that this form cannot express."""

    def rows(self, head: Head, provenance: Mapping[str, Any], where: object) -> int:
        """Rows of the matrix that serves as the drafter's head. Raises ValueError as `matrix`."""
        found = self.matrix(head, provenance, where)
        return head.at(0).vocab_size if found is None else len(found[1])

    def of(
        self,
        head: Head,
        body: Mapping[str, Tensor],
        config: Mapping[str, Any],
        provenance: Mapping[str, Any],
        where: object,
    ) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """(tensors, config.json) of a drafter, from those of its body and our config.json. Raises ValueError as
        `matrix`."""
        found = self.matrix(head, provenance, where)
        if found is None:
            return body, _without_ours(config) | {"architectures": [self.architecture]}
        return to_stock(body, *found, vocab_size=head.at(0).vocab_size), stock_config(config, len(found[1]))


class WithMatrix(StockForm):
    """EAGLE-3's: the head is a matrix over some of the tokens."""

    def matrix(self, head: Head, provenance: Mapping[str, Any], where: object) -> tuple[Tensor, Tensor]:
        return stock_matrix(head, where)


class WithTargetsHead(StockForm):
    """EAGLE's: the head is the target's, and nothing of it is stored."""

    def matrix(self, head: Head, provenance: Mapping[str, Any], where: object) -> None:
        own = head.at(0).config
        if not own.gives_rows or provenance.get("freeze_head") is not True:
            raise ValueError(
                f"{where}: SGLang gives a stock EAGLE drafter the target's LM head, and this one has its own, {own}; "
                "train it with freeze_head: true and draft_head: {kind: full}, or serve it with rayspec"
            )


# version 1 named no taps for vLLM, and had maps where all tokens are kept
EAGLE3 = WithMatrix("LlamaForCausalLMEagle3", vllm_method="eagle3", version=2)
EAGLE = WithTargetsHead("LlamaForCausalLMEagle")


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


def stock_matrix(head: Head, path: object) -> tuple[Tensor, Tensor]:
    """(matrix [S, H], target ids [S]) of a head. Raises ValueError for one that the stock form cannot express."""
    matrix = None if isinstance(head, PositionHeads) else head.as_matrix()
    if matrix is None:
        raise ValueError(
            f"{path}: a stock EAGLE-3 checkpoint holds one matrix for every draft step (a full head, a truncated one "
            f"of one size, a slimspec one multiplied out), not {head.spec()}; serve it with rayspec"
        )
    weight_SH, ids = matrix
    return weight_SH, torch.arange(head.at(0).vocab_size) if ids is None else ids


def stock_config(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """config.json of EAGLE-3's stock form, for a head of so many rows, from ours.

    The tapped layers are named twice: SGLang counts the layer whose output it taps, in `eagle_config`; vLLM reads the
    same key as the layer whose input it taps, of `eagle_config` only where the config itself has none.
    """
    named = {"architectures": [EAGLE3.architecture], "draft_vocab_size": rows, TAPS: stored_taps(config)}
    return _without_ours(config) | named


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
