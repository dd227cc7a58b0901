"""Workers that follow a measured policy (sglang_ext.policy): before each decode step the draft length is chosen, 0 for
plain decoding.

SGLang's own parts do the work: a runtime state for each length with attention, graphs and buffers of its own
(`build_adaptive_runtime_state`), the switch between them (`AdaptiveController`), a verification of the root alone (or,
on a CPU, the target's plain decode step, `plain_step.py`), and an extend of the drafter that can be left out. Its own
rule (`--speculative-adaptive`) knows no costs, serves EAGLE chains alone, and cannot take a step without drafts under
rejection sampling; ours is switched on by `--speculative-adaptive-config policy.json` without that flag, for every
algorithm whose worker is ours.
"""

import json
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_context, get_parallel, get_spec
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.metrics import metrics
from sglang_ext.adapter.workers.plain_step import can_decode_plainly, decode_plainly
from sglang_ext.policy.choice import MeasuredPolicy
from sglang_ext.policy.table import PolicyTable, read_table
from sglang_ext.whole import write_whole

logger = logging.getLogger(__name__)

HISTORY_STEPS = 20_000


def policy_file(spec: Any) -> str | None:
    """The policy file of a server that follows a policy of ours; with SGLang's own flag the file is SGLang's. `spec`:
    SGLang's settings, or those of them that are about speculation."""
    return None if spec.speculative_adaptive else spec.speculative_adaptive_config


def check_follows(worker: type, algorithm: Any, server_args: Any) -> None:
    """Raise ValueError where a server is to follow a policy, which this worker would not read."""
    if policy_file(server_args) is not None and not issubclass(worker, FollowsPolicy):
        raise ValueError(
            f"--speculative-algorithm {algorithm.name} follows no policy (--speculative-adaptive-config "
            f"{policy_file(server_args)}): its worker is SGLang's {worker.__name__}, which has no step without drafts; "
            "leave the option out"
        )


def checked_table(server_args: Any) -> PolicyTable:
    """Raises ValueError for a policy that this server cannot follow."""
    spec = get_spec()
    file, steps, topk = policy_file(spec), spec.speculative_num_steps, spec.speculative_eagle_topk
    assert file is not None, "asked for only where there is one"
    table = read_table(file)
    longest = table.lengths[-1]
    if longest != steps:
        raise ValueError(
            f"--speculative-num-steps must be {longest}, the longest draft of the policy {file}, for which buffers are "
            f"made; got {steps}"
        )
    if topk != 1 and table.lengths != [0, steps]:
        raise ValueError(
            f"the policy {file} chooses among drafts of {table.lengths} steps, but a tree (--speculative-eagle-topk "
            f"{topk}) is drafted whole or not at all: its curves must be of draft_steps 0 and {steps}"
        )
    refused = {
        "--pp-size above 1": server_args.pp_size > 1,
        "--enable-dp-attention": server_args.enable_dp_attention,
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--enable-pdmux": server_args.enable_pdmux,
        "--enable-lora": bool(server_args.enable_lora),
        "--enable-mixed-chunk": server_args.enable_mixed_chunk,  # whose steps are prefills of some requests alone
        "--enable-multi-layer-eagle": server_args.enable_multi_layer_eagle,
    }
    for option, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"a policy (--speculative-adaptive-config {file}) does not go with {option}; leave one out"
            )
    return table


class ControllersPolicy:
    """What SGLang's controller asks of a policy (its protocol `AdaptiveSpecPolicy`)."""

    def __init__(self, measured: MeasuredPolicy) -> None:
        self.measured = measured
        self._graph_sizes: list[int] | None = None

    @property
    def candidate_steps(self) -> list[int]:
        return self.measured.table.lengths

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self._graph_sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return self._graph_sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self.measured.choice.draft_steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        self.measured.see(num_correct_drafts_per_req)


class FollowsPolicy(EAGLEWorkerV2):
    """EAGLE's worker, and those that are made of it. Without a policy it changes nothing."""

    policy: MeasuredPolicy | None = None

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if policy_file(get_spec()) is None:
            return
        self.longest = LongestDraft.of_server()
        self.has_graphs = has_accelerator()  # of verification, and none of plain decoding
        self.policy = MeasuredPolicy(checked_table(server_args), start=self.longest.steps)
        self.adaptive_controller = AdaptiveController(self, ControllersPolicy(self.policy))
        self.history: deque[tuple[float, int, int]] = deque(maxlen=HISTORY_STEPS)  # time, requests, draft length
        self.rested = 0  # steps in which the drafter's cache was not filled
        self.ranks = get_parallel().tp_size
        self._was_plain = False  # whether the last step was the target's own
        self.decoded = 0  # those of them that were the target's own decode steps
        self._with_holes: WeakSet[Any] = WeakSet()  # requests that the drafter has not followed
        logger.info("rayspec policy: draft lengths %s by %s", self.policy.table.lengths, policy_file(get_spec()))

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.policy is None or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, *args, **kwargs)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._with_holes.difference_update(batch.reqs)
            return super().forward_batch_generation(batch, on_publish, *args, **kwargs)
        before, was_plain, self._was_plain = self.policy.choice.draft_steps, self._was_plain, False
        is_followed = {ref(request): request not in self._with_holes for request in batch.reqs}  # none is kept alive
        choice = self.policy.choose(is_followed)
        self.history.append((time.time(), len(batch.reqs), choice.draft_steps))
        if choice.draft_steps != before:
            self._tell(before, len(batch.reqs))
        rests = choice.draft_steps == 0 and not choice.keeps_up and self.speculative_algorithm.has_draft_kv()
        if rests:
            self.rested += 1
            if any(is_followed.values()):
                self._with_holes.update(batch.reqs)
            if not self.has_graphs and on_publish is None and can_decode_plainly(batch, self.ranks):
                self.decoded += 1
                self.activate_step_by_batch(len(batch.reqs))
                result = self.decode_plainly(batch)
                if any(is_followed.values()) or not was_plain:  # else the stubs of the step before are handed on
                    self._stub_skipped_draft_extend(batch, result)
                self._was_plain = True
                return result
        with envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.override(rests):
            return super().forward_batch_generation(batch, on_publish, *args, **kwargs)

    def decode_plainly(self, batch: Any) -> Any:
        return decode_plainly(self.target_worker, batch)

    def _tell(self, before: int, requests: int) -> None:
        assert self.policy is not None, "asked for only where there is one"
        now = self.policy.choice.draft_steps
        if (counters := metrics()) is not None:
            counters.switched(before, now)
        rates = {k: round(1e3 * requests * rate, 1) for k, rate in self.policy.rates.items()}
        shares = " ".join(f"{share:.2f}" for share in self.policy.acceptance.shares())
        logger.info(
            "rayspec policy: draft_steps %d -> %d at %d requests (expected tokens/s %s -> %s, acceptance by position "
            "%s, switch %d)",
            *(before, now, requests, rates[before], rates[now], shares, self.policy.switches),
        )

    def apply_runtime_state(self, state: Any) -> None:
        """SGLang's, but slots are reserved for the longest draft at all times: a tree's may need more of them than the
        step before, which reserves, has nodes."""
        super().apply_runtime_state(state)
        if self.topk > 1:
            get_context().override("rayspec.policy", speculative_num_steps=self.longest.steps)

    def _build_trivial_verify_input(self, batch: Any) -> Any:
        """SGLang's, in the types and with the distribution that verification wants: nothing was drafted."""
        verify_input = super()._build_trivial_verify_input(batch)
        verify_input.draft_token = verify_input.draft_token.long()
        if get_spec().speculative_use_rejection_sampling:
            vocab_size = self.target_worker.model_config.vocab_size
            verify_input.draft_probs = torch.zeros(len(batch.seq_lens), 1, vocab_size, device=self.device)
        return verify_input

    def _stub_skipped_draft_extend(self, batch: Any, batch_output: Any) -> None:
        """SGLang's, but with first drafts that may be verified: different ones, and a distribution that they follow."""
        super()._stub_skipped_draft_extend(batch, batch_output)
        if not self.draft_worker.carries_drafts:
            return
        draft_input, requests = batch_output.next_draft_input, len(batch.seq_lens)
        first = torch.arange(self.topk, device=self.device)
        draft_input.topk_index = first.expand(requests, -1).contiguous()
        if get_spec().speculative_use_rejection_sampling:
            vocab_size = self.target_worker.model_config.vocab_size
            certain = torch.zeros(requests, vocab_size, device=self.device)
            certain[:, 0] = 1.0
            draft_input.draft_probs, draft_input.topk_p = certain, certain[:, :1].clone()

    def policy_report(self) -> dict[str, Any] | None:
        """Counts since the start, and the last steps; None without a policy."""
        if self.policy is None:
            return None
        return {
            "steps": {str(k): self.policy.steps[k] for k in self.policy.table.lengths},
            "switches": self.policy.switches,
            "rested": self.rested,
            "decoded": self.decoded,
            "lost": self.policy.lost,
            "acceptance": self.policy.acceptance.shares(),
            "history": list(self.history),
        }


def write_policy(scheduler: Any, path: str) -> None:
    """Installed as `Scheduler.rayspec_write_policy`: `policy_report` as JSON, of the first rank."""
    worker = scheduler.draft_worker
    if get_parallel().tp_rank == 0:
        report = worker.policy_report() if isinstance(worker, FollowsPolicy) else None
        write_whole(Path(path), json.dumps(report))
