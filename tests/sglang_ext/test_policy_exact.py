"""The distribution under a policy by exact enumeration, without an engine: a Markov target and drafter over four
tokens, drafts drawn and verified as the engines do, the lengths chosen by the policy or by one that looks at its own
drafts.

B = requests of a step, K = drafts of each, V = vocabulary, L = tokens of an answer.
"""

from collections.abc import Callable
from itertools import count, product

import pytest
import torch
from chi_square import p_value
from policy_cases import NERVOUS, table
from torch import Tensor

from rayspec_kernels.cpu.tree_verify import verify_chain_reference
from sglang_ext.policy.choice import MeasuredPolicy
from sglang_ext.policy.table import PolicyTable
from sglang_ext.settings import build

V, L, LONGEST, ANSWERS = 4, 3, 3, 3000
P_VV = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1], [0.05, 0.7, 0.05, 0.2]])
Q_VV = 0.7 * P_VV + 0.3 / V
# milliseconds with 0, 1, ... drafts: all are worth as much, or long ones most
EVEN, CHEAP = (1.0, 1.85, 2.75, 3.4), (1.0, 1.1, 1.2, 1.3)

Shorten = Callable[
    [Tensor, Tensor], int
]  # drafts [B, K], their distributions [B, K, V] -> how many of them are verified


def answers(
    shorten: Shorten | None, together: int, costs: tuple[float, ...]
) -> tuple[list[tuple[int, ...]], MeasuredPolicy]:
    """ANSWERS of L tokens after token 0, some together, whose fates decide the lengths of all of them."""
    generator = torch.Generator().manual_seed(0)
    values = table(range(LONGEST + 1), **NERVOUS) | {
        "curves": [{"draft_steps": k, "requests": [1], "step_ms": [costs[k]]} for k in range(LONGEST + 1)],
        "accepted_if_reached": [0.95] * LONGEST,
    }
    policy, done = MeasuredPolicy(build(PolicyTable, values), start=LONGEST), []
    open_answers: list[list[int]] = [[0] for _ in range(together)]
    numbers, others = list(range(together)), count(together)  # each answer is a request of its own
    while len(done) < ANSWERS:
        k = policy.choose(dict.fromkeys(numbers, True)).draft_steps
        last_B = torch.tensor([answer[-1] for answer in open_answers])
        drafts_BK, distributions_BKV = drawn(last_B, k, generator)
        if shorten is not None and k:
            k = shorten(drafts_BK, distributions_BKV)
            drafts_BK, distributions_BKV = drafts_BK[:, :k], distributions_BKV[:, :k]
        tokens_BN = torch.cat([last_B[:, None], drafts_BK], dim=1)
        coins_BN, final_B = (torch.rand(shape, generator=generator) for shape in (tokens_BN.shape, (len(last_B),)))
        distributions_BKV = (
            distributions_BKV if k else torch.zeros(len(last_B), 1, V)
        )  # as `_build_trivial_verify_input` gives it
        accepted = verify_chain_reference(tokens_BN, P_VV[tokens_BN], distributions_BKV, coins_BN, final_B)
        counts = accepted.num_drafts_B.tolist()
        policy.see(counts)
        for b, accepted_b in enumerate(counts):
            open_answers[b] += [*drafts_BK[b, :accepted_b].tolist(), int(accepted.bonus_B[b])]
            if len(open_answers[b]) > L:
                done.append(tuple(open_answers[b][1 : L + 1]))
                open_answers[b], numbers[b] = [0], next(others)
    return done, policy


def drawn(last_B: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    drafts, distributions = [last_B[:, None]], [torch.zeros(len(last_B), 0, V)]
    for _ in range(k):
        distributions.append(Q_VV[drafts[-1][:, 0]][:, None])
        drafts.append(torch.multinomial(distributions[-1][:, 0], 1, generator=generator))
    return torch.cat([last_B.new_zeros(len(last_B), 0), *drafts[1:]], dim=1), torch.cat(distributions, dim=1)


def fit(done: list[tuple[int, ...]]) -> float:
    """P-value of the answers' counts under the target's distribution of all V^L."""
    distribution, count = {}, dict.fromkeys(product(range(V), repeat=L), 0)
    for answer in count:
        distribution[answer] = 1.0
        for before, token in zip((0, *answer), answer, strict=False):
            distribution[answer] *= float(P_VV[before, token])
    for answer in done:
        count[answer] += 1
    return p_value((list(count.values()), list(distribution.values())))


def test_the_policys_answers_follow_the_targets_distribution() -> None:
    done, policy = answers(None, together=2, costs=EVEN)
    total = sum(policy.steps.values())
    assert policy.switches > total / 10
    assert min(policy.steps[0], total - policy.steps[0]) > total / 20, policy.steps
    assert fit(done) > 1e-3


def drop_the_unlikely(drafts_BK: Tensor, distributions_BKV: Tensor) -> int:
    """None of the drafts where a first one is not its distribution's best."""
    best_B = distributions_BKV[:, 0].max(dim=1).values
    is_best_B = distributions_BKV[:, 0].gather(1, drafts_BK[:, :1])[:, 0] >= best_B
    return drafts_BK.shape[1] if is_best_B.all() else 0


def cut_an_unlikely_end(drafts_BK: Tensor, distributions_BKV: Tensor) -> int:
    """One draft less where the last one is not its distribution's best."""
    last_B = distributions_BKV[:, -1].gather(1, drafts_BK[:, -1:])[:, 0]
    return drafts_BK.shape[1] - int((last_B < distributions_BKV[:, -1].max(dim=1).values).any())


@pytest.mark.parametrize("shorten", [drop_the_unlikely, cut_an_unlikely_end])
def test_policies_that_look_at_their_own_drafts_are_found_out(shorten: Shorten) -> None:
    done, _ = answers(shorten, together=1, costs=CHEAP)
    assert fit(done) < 1e-6
