"""What our model classes share: a draft head of ours behind SGLang's logits processor, strict loading, live swap.

A model class of ours (sglang_ext.adapter.models) is `HostsHead` before a stock one of SGLang, whose body it keeps.
T = rows, H = drafter hidden size, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import Tensor, nn
from transformers import PretrainedConfig

from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.cpu.packing import pack_model
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.models.sharded_head import shared_over_ranks
from sglang_ext.adapter.served_target import served_stop_ids, served_target
from sglang_ext.adapter.side_stream import start_beside
from sglang_ext.adapter.step_clock import CLOCK
from sglang_ext.drafters.checkpoint import (
    HEAD_PREFIX,
    TREE_PREFIX,
    check_tensors,
    origins,
    shared_tensors,
)
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_head, naming, parse_info
from sglang_ext.drafters.numbers import check_finite
from sglang_ext.heads import DraftHead
from sglang_ext.trees import Pruner, PruningTree, build_tree


class Answer(NamedTuple):
    """The head's k best tokens of each row. A chain has no use for the probability of its one token: it is 1."""

    p_Tk: Tensor  # float32
    token_ids_Tk: Tensor  # int64


class Asked(NamedTuple):
    """A head, and the rows that it was asked about."""

    head: DraftHead
    hidden_TH: Tensor
    routed: Tensor | None  # rows first

    def first(self, rows: int) -> "Asked":
        return Asked(self.head, self.hidden_TH[:rows], None if self.routed is None else self.routed[:rows])


@dataclass
class HeadRequest:
    """What the draft loop wants of the head at a draft position: its k best tokens, or at a temperature its
    distribution."""

    step: int
    k: int
    temperature_T1: Tensor | None = None  # of each request, to draw k tokens; None for the k best
    best: Answer | None = None
    probs_TV: Tensor | None = None  # float32
    asked: Asked | None = None

    def answer_with(self, head: DraftHead, hidden_TH: Tensor, routed: Tensor | None) -> None:
        self.asked = Asked(head, hidden_TH, routed)
        if self.temperature_T1 is not None:
            self.probs_TV = head.target_distribution(hidden_TH, self.step, routed, self.temperature_T1)
        elif self.k == 1:
            ids_T1 = head.best(hidden_TH, self.step, routed)
            self.best = Answer(torch.ones_like(ids_T1, dtype=torch.float32), ids_T1)
        else:
            proposal = head.propose(hidden_TH, self.step, self.k, routed)
            self.best = Answer(proposal.probabilities_Tk, proposal.token_ids_Tk)


# embeddings and features [T, H] that enter the model's first layer: of a pass, or of chosen rows of it
LayerInputs = Callable[[ForwardBatch, Tensor | None], tuple[Tensor, Tensor]]


class HeadLogits(LogitsProcessor):
    """Has the head answer what the draft loop asks, and only for the rows that the loop reads.

    Without a `HeadRequest` (a pass of SGLang's own, to warm up) it gives logits of the whole vocabulary.
    """

    def __init__(self, config: Any, layer_inputs: LayerInputs) -> None:
        super().__init__(config, skip_all_gather=True)  # a head that ranks share gathers by itself
        self.request: HeadRequest | None = None
        self.routing: Callable[[], Tensor] | None = None  # the pass's router, started before the layer
        self._layer_inputs = layer_inputs
        self._batch: Any = None

    @contextmanager
    def answering(self, request: HeadRequest) -> Iterator[None]:
        """The passes inside are for `request`."""
        self.request = request
        try:
            yield
        finally:
            self.request = None

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        hidden_states_before_norm: Tensor | None = None,
    ) -> LogitsProcessorOutput:
        self._batch = logits_metadata
        return super().forward(
            input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, hidden_states_before_norm
        )

    def _get_logits(
        self,
        hidden_states: Tensor,
        lm_head: DraftHead,
        logits_metadata: Any,
        embedding_bias: Tensor | None = None,
        use_logits_buffer: bool = True,
    ) -> Tensor:
        if self.request is None:
            return lm_head.target_logits(hidden_states, 0, self._routed(lm_head, self._batch))
        rows = _rows_read_after_verify(self._batch)
        self.answer(self.request, lm_head, hidden_states if rows is None else hidden_states[rows], self._batch)
        return hidden_states.new_zeros((len(hidden_states), self.request.k))  # SGLang's choice is thrown away

    def answer(self, request: HeadRequest, head: DraftHead, hidden_TH: Tensor, batch: ForwardBatch) -> None:
        routed = self._routed(head, batch)
        with CLOCK.head():
            request.answer_with(head, hidden_TH, routed)
        CLOCK.count_shortlist(head, hidden_TH, request.step, routed)

    def start_routing(self, head: DraftHead, embed_TH: Tensor, feature_TH: Tensor, batch: ForwardBatch) -> None:
        """Let the head's router run while the layer, which is given these inputs, does. What it scores highest is
        chosen behind the layer.

        Not in a prefill, nor in a graph that is broken at attention: SGLang replays such layers without any code of
        ours, and what is begun on another stream must end in the piece of the graph that it begins in. The head is
        then asked behind the layers.
        """
        if batch.forward_mode.is_extend() or is_in_breakable_cuda_graph():
            return
        rows = _layer_rows_of_the_head(batch)
        with CLOCK.routing():
            if rows is not None:
                embed_TH, feature_TH = embed_TH[rows], feature_TH[rows]
            self.routing = start_beside(partial(head.route, step=self._step), embed_TH, feature_TH)

    @property
    def _step(self) -> int:
        return self.request.step if self.request else 0

    def _routed(self, head: DraftHead, batch: ForwardBatch) -> Tensor | None:
        """What the head's router says in this pass; None for a head that does not route."""
        routing, self.routing = self.routing, None
        if routing is not None:
            return routing()
        if not head.routes:
            return None
        with CLOCK.routing():
            return head.route(*self._layer_inputs(batch, _layer_rows_of_the_head(batch)), self._step)


def _rows_read_after_verify(batch: Any) -> Tensor | None:
    """The one row a request that is read of an eager draft-extend after verification, or None for all rows.

    SGLang's graph path selects these rows before the head (`select_index`); its eager path computes the head on all
    num_draft_tokens rows and selects afterwards, which would overstate the head's cost several times over.
    """
    if not isinstance(batch, ForwardBatch) or not batch.forward_mode.is_draft_extend_v2():
        return None
    spec = batch.spec_info
    if spec.select_index is not None or spec.num_accept_tokens is None:
        return None
    accepted_B = spec.num_accept_tokens.long()
    return torch.arange(len(accepted_B), device=accepted_B.device) * spec.num_tokens_per_req + accepted_B - 1


def _layer_rows_of_the_head(batch: Any) -> Tensor | None:
    """Which rows of the layer's input belong to the rows of the head, or None where they are the same."""
    rows = _rows_read_after_verify(batch)
    if rows is not None:
        return rows
    if batch.forward_mode.is_draft_extend_v2():  # which SGLang's `is_extend` leaves out
        return batch.spec_info.select_index
    if not batch.forward_mode.is_extend():
        return None
    return batch.extend_seq_lens.long().cumsum(0) - 1  # a prefill: the last of each request


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A drafter as a model hosts it, but for the body. `origins`: see `sglang_ext.drafters.checkpoint.origins`."""

    info: CheckpointInfo
    head: DraftHead
    pruner: Pruner | None  # prunes what the draft loop expands; None: EAGLE-2's choice, or a chain
    origins: Mapping[str, str]


class HostsHead(nn.Module, ABC):
    """Put before a stock model class of SGLang: its `lm_head` becomes a draft head of ours, it loads strictly and can
    be swapped live. A class says which `algorithm` serves it, and implements `draft_step`."""

    algorithm: ClassVar[str]
    longest: LongestDraft
    info: CheckpointInfo
    pruner: Pruner | None = None
    origins: Mapping[str, str] = MappingProxyType({})  # of the tensors that run
    extend: ForwardBatch | None = None  # whose pass it is

    def host(self, info: CheckpointInfo, config: Any) -> None:
        """Replace SGLang's head and logits processor, when its own __init__ is done."""
        self.longest = LongestDraft.of_server()
        self.info = info
        self.config = config
        self.lm_head = _head_of(info)
        self.logits_processor = HeadLogits(config, self.layer_inputs)
        self.model.embed_tokens.forward = CLOCK.clocked("embedding_s", self.model.embed_tokens.forward)
        if not has_accelerator():
            mlp = self.model.layers[-1].mlp
            mlp.forward = partial(self._of_rows_read, mlp.forward)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The stock model's; an extend. Draft steps call the body themselves."""
        self.extend = forward_batch
        try:
            return super().forward(input_ids, positions, forward_batch, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.extend = None

    def _of_rows_read(self, mlp: Callable[..., Tensor], hidden_TH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The last layer's MLP, behind which rows meet no more: of a prompt only the last is read, of a verified block
        the last accepted. Half of the weights that a row of EAGLE-3's body meets are the MLP's."""
        rows = None if self.extend is None else _layer_rows_of_the_head(self.extend)
        if rows is None:
            return mlp(hidden_TH, *args, **kwargs)
        out_TH = torch.zeros_like(hidden_TH)
        out_TH[rows] = mlp(hidden_TH[rows], *args, **kwargs)
        return out_TH

    @abstractmethod
    def layer_inputs(self, batch: ForwardBatch, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """`LayerInputs` of this model."""

    @abstractmethod
    def draft_step(self, batch: Any, request: HeadRequest) -> Tensor | None:
        """One pass of the body in the draft loop, which answers `request`; what the next step gets of it [T, H]."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load body and head. Raises ValueError unless names and shapes are exactly the checkpoint's."""
        self.origins = self._origins()  # before they are read: files may be exchanged at any time
        tensors = {self.info.body.own_name(name): tensor for name, tensor in weights}
        tensors |= shared_tensors(self.info, own=tensors)
        check_tensors(tensors, self.info)
        check_finite(tensors, self.info.path)
        self.pruner = _pruner_of(self.info, tensors, self.longest, self._device)
        _load_head(self.lm_head, tensors, self.info, self.longest)
        self.lm_head = shared_over_ranks(self.lm_head)
        self._load_body(tensors)

    def _origins(self) -> dict[str, str]:
        """Empty for files that are not ours alone, such as those of a hub's name: a swap then reads all that it
        needs."""
        try:
            return origins(self.info)
        except ValueError:
            return {}

    @property
    def hosted(self) -> Hosted:
        return Hosted(info=self.info, head=self.lm_head, pruner=self.pruner, origins=self.origins)

    def take_over(self, hosted: Hosted) -> None:
        """All of a drafter but the body."""
        self.info, self.lm_head, self.pruner, self.origins = hosted.info, hosted.head, hosted.pruner, hosted.origins

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _load_body(self, tensors: Mapping[str, Tensor]) -> None:
        body = ((name, t) for name, t in tensors.items() if is_of_body(name))
        super().load_weights(body)  # type: ignore[misc]  # SGLang's class has it
        if not has_accelerator():
            self.lm_head.pack()
            pack_model(self)

    @torch.no_grad()
    def swap(self, info: CheckpointInfo, tensors: dict[str, Tensor], origins: Mapping[str, str]) -> bool:
        """Take over the weights of another drafter with the same body shapes, any head and any tree. What is `held` may
        be on `meta`. Whether the body has stayed as it was.

        Everything that can be wrong is checked before the first weight changes. Raises ValueError.
        """
        check_replaces(self.info, info, tensors)
        reference = next(self.model.parameters())
        head = _head_of(info).to(reference.device, reference.dtype)
        _load_head(head, tensors, info, self.longest)
        pruner = _pruner_of(info, tensors, self.longest, self._device)
        body = {n for n in tensors if is_of_body(n)}
        held = self.held(origins)
        self.take_over(Hosted(info=info, head=shared_over_ranks(head), pruner=pruner, origins=origins))
        self._load_body({name: tensor for name, tensor in tensors.items() if name not in held})
        return body <= held

    def held(self, origins: Mapping[str, str]) -> set[str]:
        """Names of a drafter's tensors that are in the running body already: they come from the same file."""
        return {n for n, origin in origins.items() if is_of_body(n) and self.origins.get(n) == origin}


def is_of_body(name: str) -> bool:
    """Whether a tensor of a drafter is neither its head's nor its tree's."""
    return not name.startswith((HEAD_PREFIX, TREE_PREFIX))


def hosted_info(config: Any, algorithm: str) -> CheckpointInfo:
    """The checkpoint that SGLang builds a model of ours from. Raises ValueError where it is for another target, or
    another algorithm, or where this server cannot serve any."""
    if get_parallel().attn_dp_enabled:
        raise ValueError(
            "--enable-dp-attention is not offered for rayspec's drafters, whose draft loop does not pad the batches of "
            "idle ranks; leave it out"
        )
    if get_spec().speculative_token_map is not None:
        raise ValueError(
            "--speculative-token-map would choose the tokens of rayspec's drafters a second time, whose heads name the "
            "target's own; leave it out, or train a head of kind truncated"
        )
    # config.json itself: SGLang pads sizes in `config` on some devices
    raw, _ = PretrainedConfig.get_config_dict(config._name_or_path)
    info = parse_info(raw, config._name_or_path)
    asked = get_spec().speculative_algorithm.upper()
    if asked != algorithm:
        raise ValueError(
            f"--speculative-algorithm {asked} cannot serve drafter {info.path} of kind {info.kind}; use {algorithm}"
        )
    check_target(info)
    return info


def check_replaces(running: CheckpointInfo, info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a drafter can take the place of the running one: its kind, target, body and tensors."""
    if info.kind != running.kind:
        raise ValueError(
            f"cannot swap in {info.path}: a drafter of kind {info.kind} needs another worker than the running "
            f"{running.kind} has; restart"
        )
    check_target(info)
    if info.body != running.body:
        raise ValueError(f"cannot swap in {info.path}: its body {info.body} differs from {running.body}; restart")
    check_tensors(tensors, info)


def check_target(info: CheckpointInfo) -> None:
    """Raise ValueError unless the drafter was trained for the target that this server serves."""
    assert info.target is not None, "parse_info gives a target to every checkpoint of our own architecture"
    assert info.body.tap_layers is not None, "only a stock checkpoint leaves them open"
    served = served_target(info.body.tap_layers, with_output=info.body.taps_output)
    info.target.check_served_with(served, info.path)


def _head_of(info: CheckpointInfo) -> DraftHead:
    head = empty_head(info).to(torch.get_default_dtype())
    CLOCK.watch(head)
    return head


def _load_head(head: DraftHead, tensors: Mapping[str, Tensor], info: CheckpointInfo, longest: LongestDraft) -> None:
    """Raises ValueError where the tensors contradict each other, where a stop token of the target is out of reach, and
    where a row may have fewer candidates than the tree has branches."""
    with naming(info.path):
        head.load_state_dict({n.removeprefix(HEAD_PREFIX): t for n, t in tensors.items() if n.startswith(HEAD_PREFIX)})
        head.check(served_stop_ids())
        head.expect_rows((1, longest.topk))  # the draft loop's beam
        fewest = head.fewest_candidates(longest.steps)
        if fewest < longest.topk:
            raise ValueError(
                f"a head of kind '{head.kind}' that may score as few as {fewest} tokens cannot serve "
                f"--speculative-eagle-topk {longest.topk}; lower it, or use a head with more candidates"
            )


def _pruner_of(
    info: CheckpointInfo, tensors: Mapping[str, Tensor], longest: LongestDraft, device: torch.device
) -> Pruner | None:
    """The drafter's tree at this engine's size; a chain takes no notice of it. Raises ValueError where it does not
    fit."""
    if info.tree is None:
        return None
    with naming(info.path):
        tree = build_tree(info.tree, vocab_size=info.body.vocab_size)
        assert isinstance(tree, PruningTree), "check_tensors has made the drafter"
        tree.load_state_dict({n.removeprefix(TREE_PREFIX): t for n, t in tensors.items() if n.startswith(TREE_PREFIX)})
        tree.check()
        if longest.topk == 1:
            return None
        if get_parallel().pp_size > 1:
            raise ValueError(
                "it has a draft_tree, which SGLang cannot hand to the other stages of a pipeline; leave --pp-size out"
            )
        return tree.pruner(longest.steps, longest.topk, longest.nodes, device)
