"""What is asked of a server's longest drafts is asked while a policy has shorter ones, too."""

from sglang.srt.runtime_context import get_context, get_spec

from sglang_ext.adapter.longest_draft import LongestDraft


def test_a_policy_at_rest_does_not_change_it() -> None:
    started = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    with get_context().override_server_args(**started):
        get_context().override("at rest", speculative_num_steps=0, speculative_num_draft_tokens=1)
        assert get_spec().speculative_num_steps == 0
        assert LongestDraft.of_server() == LongestDraft(steps=3, topk=2, nodes=6)


def test_sglangs_own_choice_of_lengths_may_be_longer_than_the_start() -> None:
    started = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    with get_context().override_server_args(**started, speculative_adaptive=True):
        assert LongestDraft.of_server() == LongestDraft(steps=7, topk=1, nodes=8)
