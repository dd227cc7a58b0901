"""How long the drafts of a server can be. What SGLang's settings say is of the present step: under a policy, which
chooses the length of each step, they are shorter, and 0 steps at rest; under SGLang's own they may be longer."""

from dataclasses import dataclass

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_server_args
from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config


@dataclass(frozen=True)
class LongestDraft:
    """`nodes`: of the tree that the target verifies, with its root."""

    steps: int
    topk: int
    nodes: int

    @classmethod
    def of_server(cls) -> "LongestDraft":
        """By the arguments that the server was started with, and what SGLang made of those left out."""
        args = resolved_view(get_server_args())
        steps, nodes = args.speculative_num_steps, args.speculative_num_draft_tokens
        if args.speculative_adaptive:  # of chains alone
            steps = max(steps, *resolve_candidate_steps_from_config(args.speculative_adaptive_config))
            nodes = max(nodes, steps + 1)
        return cls(steps, args.speculative_eagle_topk, nodes)
