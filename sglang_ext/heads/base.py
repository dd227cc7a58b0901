"""What every draft head is: the map from a drafter's hidden state to candidate tokens.

T = rows (tokens), H = drafter hidden size, V = target vocabulary, S = the head's support (S <= V), k = candidates.

A head is a plain torch module without any SGLang import: the trainer and the SGLang adapter run the same code.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayspec_kernels.common.best import MAX_K, Best
from rayspec_kernels.common.dispatch import uses_kernel
from rayspec_kernels.common.quantized import Quantized, dequantize_reference
from rayspec_kernels.cpu.packed_linear import PackedLinear, can_pack
from rayspec_kernels.gather_dot import gather_dot
from rayspec_kernels.quantized_linear import quantized_linear
from rayspec_kernels.quantized_linear.host import QuantizedLinear
from sglang_ext.heads.config import HeadConfig
from sglang_ext.heads.losses import KL, Objective
from sglang_ext.heads.quantized import QuantizedMatrix, round_through


class Candidates(NamedTuple):
    """The tokens that a head scores. A column that holds no token (padding) has the logit `NO_TOKEN`, so q = 0."""

    logits_TS: Tensor  # in the dtype of the hidden state
    ids: Tensor | None  # int64 target ids: [S] for all rows (distinct), [T, S] for each row, None where column v is v


# finite, since SGLang's checks take infinities for faults; within float16; exp(NO_TOKEN - any logit) is 0 in float32
NO_TOKEN = -6e4

MAX_FUSED_ROWS = 64  # beyond what the kernels are made and timed for, a product and a search of its result serve


class Proposal(NamedTuple):
    """The k best candidates of each row: log q(token) = scores - log_norm."""

    scores_Tk: Tensor  # float32 logits, best first
    token_ids_Tk: Tensor  # int64 target-token ids
    log_norm_T: Tensor  # float32 log-sum-exp over the head's support

    @property
    def probabilities_Tk(self) -> Tensor:
        return (self.scores_Tk - self.log_norm_T[:, None]).exp()


class Share(NamedTuple):
    """Which rows of a head's matrix a rank has: every `ranks`-th, from row `rank` on. So all ranks have as many of each
    list of first rows, and what a rank has of such a list are its own first rows."""

    rank: int
    ranks: int
    sizes: tuple[int, ...]  # how many of the whole head's rows are scored at draft step 0, 1, ...; then the last

    @property
    def rows(self) -> slice:
        return slice(self.rank, None, self.ranks)

    @property
    def own_sizes(self) -> tuple[int, ...]:
        return tuple(self.rows_of(self.rank, step) for step in range(len(self.sizes)))

    def rows_of(self, rank: int, step: int) -> int:
        """How many rows a rank scores at a draft step."""
        return len(range(rank, self.size_at(step), self.ranks))

    def size_at(self, step: int) -> int:
        return self.sizes[min(step, len(self.sizes) - 1)]


class Shard(NamedTuple):
    """What a rank has of a head."""

    head: "DraftHead"  # whose token ids count its own rows
    share: Share
    ids: Tensor | None  # of the whole head, as in `Candidates`


class HeadCost(NamedTuple):
    """Least work of one call: weights and activations that must move once, and multiply-adds counted as two."""

    bytes: int
    flops: int


class DraftHead(nn.Module, ABC):
    """Base of all heads. A kind implements `candidates` and `from_target`, and overrides what its support changes.

    `step` is the position in the draft (0 = the token after the verified one); it is a Python int, so that a
    captured graph has it baked in.

    A head whose router needs no more than what is known before the drafter's layer has run implements `route` on that:
    the embedding of each row's input token and the feature that enters the layer. Whoever drafts calls `route` first
    and hands the result back as `routed`.
    """

    Config: ClassVar[type[HeadConfig]]
    projections: ClassVar[tuple[str, ...]] = ()  # the matrices that `project` multiplies by when serving
    gathered: ClassVar[tuple[str, ...]] = ()  # the matrices of which `gather_dot` reads rows
    maps: ClassVar[tuple[str, ...]] = ()  # the buffers whose values, and not only shapes, say what there is to score
    routes: ClassVar[bool] = False
    # around what a head does to choose, by its router's scores, what it then scores; a server's clock takes its place
    choosing: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    # int32 [draft positions, requests, rows of a request], where a server wants `note`d what a pass scores
    noted: Tensor | None = None

    def __init__(self, config: HeadConfig, hidden_size: int, vocab_size: int) -> None:
        """Weights are NaN until they are loaded. Raises ValueError for options that do not fit these sizes."""
        super().__init__()
        config.check_sizes(hidden_size, vocab_size)
        self.config, self.hidden_size, self.vocab_size = config, hidden_size, vocab_size
        self._packed: dict[tuple[str, int | None], PackedLinear | QuantizedLinear] = {}
        self._cast: dict[tuple[str, int | None], tuple[tuple[Any, ...], Tensor]] = {}
        self._rows_by_step: tuple[int, ...] = (1,)

    @classmethod
    def unloaded(cls, config: Any, target_head_VH: Tensor) -> Self:
        """A head of the sizes of an LM head [V, H], whose weights are NaN."""
        vocab_size, hidden_size = target_head_VH.shape
        return cls(config, hidden_size, vocab_size)

    @classmethod
    @abstractmethod
    def from_target(cls, config: Any, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """A head initialised from an LM head [V, H] (any float dtype; computed in float32): the target's, or the
        trained one of a full drafter. `artifacts` are what calibration made for this kind, by the names of the
        head's tensors; none for most kinds."""

    @property
    def kind(self) -> str:
        return self.config.kind

    def at(self, step: int) -> Self:
        """The head of a draft position: this one, for all of them."""
        return self

    def expect_rows(self, rows_by_step: Sequence[int]) -> None:
        """Say how many rows a request has at each draft step; they lie side by side, and the last number holds for all
        later steps. One each, where nobody says so. Numbers of a served tree, which a captured graph has baked in."""
        self._rows_by_step = tuple(rows_by_step)

    def rows_of_a_request(self, step: int) -> int:
        return self._rows_by_step[min(step, len(self._rows_by_step) - 1)]

    def spec(self) -> dict[str, Any]:
        """The `draft_head` entry of this head: {kind, options}."""
        return self.config.spec()

    def new_parameter(self, *shape: int) -> nn.Parameter:
        """NaN until loaded or initialised: forgetting it is loud."""
        return nn.Parameter(torch.full(shape, float("nan")))

    def project(self, x_TK: Tensor, weight: str, rows: int | None = None) -> Tensor:
        """x W^T with the first `rows` rows (None: all) of the parameter named `weight`, from a packed copy where
        `pack` has made one."""
        packed = self._packed.get((weight, rows))
        if packed is not None:
            return packed(x_TK)
        matrix = getattr(self, weight)
        if isinstance(matrix, QuantizedMatrix):
            return quantized_linear(x_TK, matrix.quantized(rows))
        is_frozen = not matrix.requires_grad
        if self.config.weight_format is not None:  # in training: what will be stored
            matrix = round_through(matrix, self.config.weight_format, self.config.group_size)
        if rows is not None:  # only then: autocast keeps what it made of a parameter, but not of a view
            matrix = matrix[:rows]
        if is_frozen and self.config.weight_format is None:  # what was rounded is another tensor each time
            matrix = self._cast_once(matrix, (weight, rows))
        return F.linear(x_TK, matrix)

    def _cast_once(self, matrix: Tensor, key: tuple[str, int | None]) -> Tensor:
        """A frozen matrix in autocast's type, which would otherwise be made anew at each call: of a whole vocabulary
        that took half as long as a product with 256 rows on a CPU."""
        device = matrix.device.type
        if not torch.is_autocast_enabled(device):
            return matrix
        state = (torch.get_autocast_dtype(device), matrix.data_ptr(), matrix._version)
        if self._cast.get(key, (None,))[0] != state:
            self._cast[key] = (state, matrix.to(state[0]))
        return self._cast[key][1]

    def gather_dot(self, x_TH: Tensor, weight: str, ids_Tn: Tensor) -> Tensor:
        """The dot products of each row of x with its own chosen rows of the matrix named `weight`, [T, n]."""
        return gather_dot(x_TH, self.stored(weight), ids_Tn)

    def shard(self, rank: int, ranks: int) -> "Shard | None":
        """What one of several tensor-parallel ranks holds of this head; None where every rank needs all of it."""
        return None

    def with_rows(self, config: HeadConfig, vocab_size: int, rows: slice, *shortened: str) -> Self:
        """A head of this kind that has these rows of the tensors named `shortened`, with their scales, and all of the
        others; copied."""
        part = type(self)(config, self.hidden_size, vocab_size)
        part.quantize(is_loaded=False)
        state = {
            name: (tensor[rows] if name.split(".")[0] in shortened else tensor).clone(
                memory_format=torch.contiguous_format
            )
            for name, tensor in self.state_dict().items()
        }
        part.load_state_dict(state, assign=True)
        return part

    def stored(self, weight: str, rows: int | None = None) -> Tensor | Quantized:
        """The first `rows` rows (None: all) of the matrix named `weight`, as kernels take them."""
        matrix = getattr(self, weight)
        return matrix.quantized(rows) if isinstance(matrix, QuantizedMatrix) else matrix[:rows]

    def rows_of(self, weight: str, ids_n: Tensor) -> Tensor:
        """Chosen rows [n, K] of the matrix named `weight`, in floating point."""
        matrix = getattr(self, weight)
        return matrix.rows(ids_n) if isinstance(matrix, QuantizedMatrix) else matrix.index_select(0, ids_n)

    def all_rows(self, weight: str) -> Tensor:
        """The whole matrix named `weight`, in floating point."""
        matrix = getattr(self, weight)
        return dequantize_reference(matrix.quantized()) if isinstance(matrix, QuantizedMatrix) else matrix.data

    def as_matrix(self) -> tuple[Tensor, Tensor | None] | None:
        """The head as one matrix [S, H] and the target ids [S] of its rows (None: row v is token v), which is all that
        a stock EAGLE-3 checkpoint can hold; None for a head that is more than that."""
        return None

    def quantize(self, is_loaded: bool = True) -> None:
        """Store the matrices in `config.weight_format`; nothing where it is None. Training ends with this.

        `is_loaded`: False gives empty matrices of that form, for weights that are loaded afterwards.
        """
        weight_format, group_size = self.config.weight_format, self.config.group_size
        if weight_format is None:
            return
        for name in dict.fromkeys((*self.projections, *self.gathered)):
            matrix = getattr(self, name)
            if isinstance(matrix, QuantizedMatrix):
                continue
            delattr(self, name)
            if is_loaded:
                setattr(self, name, QuantizedMatrix.of(matrix, weight_format, group_size))
            else:
                setattr(self, name, QuantizedMatrix(tuple(matrix.shape), weight_format, group_size))

    def pack(self) -> None:
        """Make packed copies of the projections for serving on a CPU; call it again after the weights changed."""
        self._packed = {}
        for name in self.projections:
            self.pack_rows(name, None)

    def pack_rows(self, weight: str, rows: int | None) -> None:
        matrix = getattr(self, weight)
        if isinstance(matrix, QuantizedMatrix):
            self._packed[weight, rows] = QuantizedLinear(matrix.quantized(rows))
        elif can_pack(matrix[:rows]):
            self._packed[weight, rows] = PackedLinear(matrix[:rows])

    def check(self, stop_ids: Iterable[int] = ()) -> None:
        """Raise ValueError where the loaded tensors contradict each other, leave a stop token out of reach or cannot be
        served on their device."""
        for part in self.modules():
            if isinstance(part, QuantizedMatrix):
                part.check_device()

    def take_maps(self, maps: Mapping[str, Tensor]) -> None:
        """Set the `maps`, by their names, of a head without its weights. Raises ValueError where they do not fit."""

    @property
    def scores_by_map(self) -> bool:
        """Whether it or a head in it has `maps`, without which there is no saying how many tokens it scores."""
        return any(part.maps for part in self.modules() if isinstance(part, DraftHead))

    def fewest_candidates(self, draft_steps: int) -> int:
        """The least number of tokens that a row may have to choose from in so many steps; a tree needs its top-k."""
        return self.vocab_size

    def shortlist_size(self, step: int) -> int | None:
        """How many tokens the head scores for every row of a draft step, whatever the row is; None where a router
        decides that, so that it has to be counted."""
        return self.vocab_size

    def scored(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Tensor:
        """How many tokens the head scores for each row, its shortlist; int64 [T], padding left out. Arguments as of
        `candidates`. Cheap beside it, but not free where a router chooses."""
        size = self.shortlist_size(step)
        assert size is not None, "a head whose router decides it says what it scores itself"
        return torch.full((len(hidden_TH),), size, device=hidden_TH.device)

    def note(self, rows: int, step: int, scored_G: Tensor) -> None:
        """Write to `noted` what a pass has scored: so many tokens for each row of a group, which are equally many of
        these rows, side by side. A copy on the device, which graphs capture."""
        assert self.noted is not None, "a pass counts for nobody"
        of_a_request = self.rows_of_a_request(step)
        scored_BR = scored_G[:, None].expand(-1, rows // max(len(scored_G), 1)).reshape(-1, of_a_request)
        noted_BR = self.noted[step, : len(scored_BR), :of_a_request]
        noted_BR.copy_(scored_BR[: len(noted_BR)])

    def route(self, token_embed_TH: Tensor, feature_TH: Tensor, step: int) -> Tensor | None:
        """What `candidates` of the same rows needs, from what is known before the drafter's layer has run."""
        return None

    @abstractmethod
    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        """Score the tokens of the head's support."""

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best | None:
        """`propose` by a kernel that never writes the logits; None where this kind has none for the asked step."""
        return None

    def best(self, hidden_TH: Tensor, step: int, routed: Tensor | None = None) -> Tensor:
        """The best candidate of each row, int64 [T, 1]; of equal logits the first column's. A chain needs no more, and
        normalising over the vocabulary costs half as much as a small head."""
        fused = self.fused(hidden_TH, step, 1, routed) if may_fuse(hidden_TH) else None
        if fused is not None:
            return fused.ids_Bk
        logits_TS, ids = self.candidates(hidden_TH, step, routed)
        return token_ids(logits_TS.argmax(dim=-1, keepdim=True), ids)

    def propose(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None = None) -> Proposal:
        """The k best candidates of each row, normalised over the support. Equal logits: the first column at k = 1."""
        fused = self.fused(hidden_TH, step, k, routed) if may_fuse(hidden_TH, k=k) else None
        if fused is not None:
            return Proposal(*fused)
        logits_TS, ids = self.candidates(hidden_TH, step, routed)
        logits_TS = logits_TS.float()
        if not 1 <= k <= logits_TS.shape[-1]:
            raise ValueError(f"k must be in 1..{logits_TS.shape[-1]} (the head's support), got {k}")
        if k == 1:  # argmax has a tie rule (first), topk has none
            columns_Tk = logits_TS.argmax(dim=-1, keepdim=True)
            scores_Tk = logits_TS.gather(-1, columns_Tk)
        else:
            scores_Tk, columns_Tk = logits_TS.topk(k, dim=-1)
        return Proposal(scores_Tk, token_ids(columns_Tk, ids), logits_TS.logsumexp(dim=-1))

    def distribution(
        self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None, temperature_T1: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(q float32 [T, S], ids as in `Candidates`): the distribution that the drafter samples from, rows sum to 1.

        `temperature_T1`: of each row; None for 1.
        """
        logits_TS, ids = self.candidates(hidden_TH, step, routed)
        logits_TS = logits_TS.float()
        return (logits_TS if temperature_T1 is None else logits_TS / temperature_T1).softmax(dim=-1), ids

    def target_distribution(
        self, hidden_TH: Tensor, step: int, routed: Tensor | None = None, temperature_T1: Tensor | None = None
    ) -> Tensor:
        """`distribution` over target ids, float32 [T, V]: 0 off the support."""
        q_TS, ids = self.distribution(hidden_TH, step, routed, temperature_T1)
        if ids is None:
            return q_TS
        probs_TV = q_TS.new_zeros(len(q_TS), self.vocab_size)
        # where rows have their own ids, a padding column may name any token: it adds nothing to it
        return probs_TV.index_copy_(1, ids, q_TS) if ids.dim() == 1 else probs_TV.scatter_add_(1, ids, q_TS)

    def target_logits(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Tensor:
        """Float32 logits [T, V] in target ids, `NO_TOKEN` off the support."""
        logits_TS, ids = self.candidates(hidden_TH, step, routed)
        logits_TS = logits_TS.float()
        if ids is None:
            return logits_TS
        out_TV = logits_TS.new_full((len(logits_TS), self.vocab_size), NO_TOKEN)
        if ids.dim() == 1:
            return out_TV.index_copy_(1, ids, logits_TS)
        # a padding column may name any token: the largest wins, so that it never hides one
        return out_TV.scatter_reduce_(1, ids, logits_TS, "amax")

    def training_targets(self, p_TV: Tensor, objective: Objective = KL) -> tuple[Tensor, Tensor]:
        """What the head is trained towards: (P [T, S] rows summing to 1, mask bool [T] of rows that count).

        The full support has nothing to renormalise and keeps every row.
        """
        return p_TV, torch.ones(p_TV.shape[0], dtype=torch.bool, device=p_TV.device)

    def loss(
        self, hidden_TH: Tensor, step: int, routed: Tensor | None, p_TV: Tensor, objective: Objective = KL
    ) -> Tensor:
        """Training loss of each row, float32 [T], 0 where the row does not count: the objective's of q from
        `training_targets`."""
        logits_TS = self.candidates(hidden_TH, step, routed).logits_TS
        targets_TS, counts_T = self.training_targets(p_TV, objective)
        return objective.of(logits_TS, targets_TS) * counts_T

    @abstractmethod
    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        """Least bytes moved (at the parameters' dtype) and FLOPs for `rows` rows at a draft step; from shapes alone.
        `scored`: the mean that `scored` had at this step, for heads of which a router decides it; None for an
        estimate."""


def may_fuse(x_TH: Tensor, *parameters: Tensor, k: int = 1) -> bool:
    """Whether kernels serve this call; decided by device, type and shape alone, so that a graph captures it.
    `parameters` that ask for a gradient must not go through a kernel."""
    return k <= MAX_K and len(x_TH) <= MAX_FUSED_ROWS and uses_kernel(x_TH, *parameters)


def row_bytes(matrix: Tensor | QuantizedMatrix) -> int:
    """Stored bytes of one row of a matrix."""
    return matrix.row_bytes if isinstance(matrix, QuantizedMatrix) else matrix.shape[1] * matrix.element_size()


def activation_bytes(matrix: Tensor | QuantizedMatrix) -> int:
    """Bytes of an activation that meets the matrix."""
    return 2 if isinstance(matrix, QuantizedMatrix) else matrix.element_size()


def dense_cost(rows: int, weight_NK: Tensor | QuantizedMatrix, outputs: int | None = None) -> HeadCost:
    """Cost of x W^T with the first `outputs` rows of W (None: all): the weight once, inputs and outputs of each row."""
    N, K = outputs or weight_NK.shape[0], weight_NK.shape[1]
    moved = N * row_bytes(weight_NK) + rows * (N + K) * activation_bytes(weight_NK)
    return HeadCost(bytes=moved, flops=2 * rows * N * K)


def gather_cost(rows: int, weight_NK: Tensor | QuantizedMatrix, choices: int) -> HeadCost:
    """Cost of dot products with `choices` chosen rows of W for each row of x: those rows, their ids and the results."""
    K = weight_NK.shape[1]
    moved = row_bytes(weight_NK) + activation_bytes(weight_NK) + 8
    return HeadCost(bytes=rows * choices * moved, flops=2 * rows * choices * K)


def token_ids(columns_Tk: Tensor, ids: Tensor | None) -> Tensor:
    """Target ids of columns, with `ids` as in `Candidates`."""
    if ids is None:
        return columns_Tk
    return ids[columns_Tk] if ids.dim() == 1 else ids.gather(1, columns_Tk)
