"""Whether an engine on the toy target emits tokens of the target's distribution, whatever its drafter, head and tree.

R = requests of one prompt, J = answer tokens, V = vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from chi_square import MIN_EXPECTED, p_value, pearson
from engines import generate
from scipy.stats import chi2
from toy import PROMPTS, Toy, V, filtered

NEW_TOKENS = 27  # the first comes from the prompt's own pass, so that 26 follow the rules of speculation
PREFIX_TOKENS = 4
MIN_P = 1e-3
MIN_P_UNSEEDED = 1e-6  # other draws in every run
FILTERS: dict[str, dict[str, Any]] = {
    "top_k_and_top_p": {"top_k": 5, "top_p": 0.7},
    "min_p": {"min_p": 0.12},
    "all": {"temperature": 0.8, "top_k": 8, "top_p": 0.85, "min_p": 0.05},
    "logit_bias": {"logit_bias": {"3": 1.5, "5": -1000.0, "9": -0.5}, "top_k": 6, "top_p": 0.9},
}


@dataclass(frozen=True)
class Sample:
    """Answers of one prompt, and the target's logits at every token of them."""

    answers_RJ: np.ndarray
    logits_RJV: np.ndarray


@dataclass(frozen=True)
class Fit:
    """P-values of the emitted tokens under a distribution; each sees another kind of fault."""

    after_prefix: float  # counts of the token after each prefix that was seen often enough (few tokens, every fault)
    tokens: float  # counts of all tokens against the sum of their distributions
    after_token: float  # and those after each token, that is counts of pairs
    uniform: float  # the probability mass before each token, likeliest first, is uniform
    pairs: float  # and that of two tokens in a row is uniform over the square

    @property
    def p_value(self) -> float:
        """Of all together (Bonferroni)."""
        values = astuple(self)
        return min(1.0, len(values) * min(values))


@dataclass(frozen=True)
class DistributionReport:
    fit: Fit
    num_pairs: int  # of speculated tokens in a row
    tau: float | None  # None where nothing was drafted
    samples: list[Sample]


def check_distributions(
    engine: Any, toy: Toy, settings: Mapping[str, Mapping[str, Any]], **options: Any
) -> dict[str, DistributionReport]:
    """`sample_distributions`; raises AssertionError where a setting's tokens do not follow its distribution."""
    reports = sample_distributions(engine, toy, settings, **options)
    for name, report in reports.items():
        assert report.fit.p_value > (MIN_P if options.get("seed", 0) is not None else MIN_P_UNSEEDED), (
            f"{name}: {report.fit}"
        )
        assert report.tau is None or report.tau > 1.2, f"{name}: drafts were to be accepted, tau is {report.tau}"
    return reports


def sample_distributions(
    engine: Any,
    toy: Toy,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    requests: int,
    new_tokens: int = NEW_TOKENS,
    seed: int | None = 0,
) -> dict[str, DistributionReport]:
    """Sample answers at all settings, mixed in the same batches, and hold each setting's against Hugging Face's
    distribution.

    Args:
        engine: an engine that serves the toy target.
        settings: temperature, top_k, top_p, min_p, logit_bias.
        requests: of each setting.
        seed: of the first request, the next ones count on, so that the outcome is the same in every run; None for
            requests without seeds, of which `check_distributions` asks less.
    """
    keys = [(name, prompt) for name in settings for prompt in PROMPTS]
    asked = keys * (requests // len(PROMPTS))
    options = [{"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True} | settings[n] for n, _ in asked]
    if seed is not None:
        options = [option | {"sampling_seed": seed + i} for i, option in enumerate(options)]
    answers = engine.generate(input_ids=[list(prompt) for _, prompt in asked], sampling_params=options)
    reports = {}
    for name, sampling in settings.items():
        mine = [answer for answer, (setting, _) in zip(answers, asked, strict=True) if setting == name]
        samples = []
        for i, prompt in enumerate(PROMPTS):
            answers_RJ = np.array([answer["output_ids"] for answer in mine[i :: len(PROMPTS)]])
            assert answers_RJ.shape == (requests // len(PROMPTS), new_tokens)
            samples.append(Sample(answers_RJ, toy.logits(prompt, answers_RJ)))
        rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in mine)
        drafts = sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in mine)
        result = fit(samples, lambda logits, sampling=sampling: filtered(logits, **sampling))
        reports[name] = DistributionReport(
            result, len(mine) * (new_tokens - 2), 1 + drafts / rounds if rounds else None, samples
        )
        print(name, dict(sampling), reports[name].num_pairs, f"pairs, tau {reports[name].tau}", result)
    return reports


def fit(samples: list[Sample], distribution: Callable[[np.ndarray], np.ndarray]) -> Fit:
    """How well the speculated tokens of all samples follow a distribution, which is a function of the logits."""
    distributions = [distribution(sample.logits_RJV) for sample in samples]
    after_prefix = [
        _after_prefix(sample.answers_RJ[:, :j], sample.answers_RJ[:, j], distribution_RJV[:, j])
        for sample, distribution_RJV in zip(samples, distributions, strict=True)
        for j in range(1, PREFIX_TOKENS + 1)
    ]
    answers_RJ, distribution_RJV = (
        np.concatenate([sample.answers_RJ for sample in samples]),
        np.concatenate(distributions),
    )
    u_RJ = _mass_before(answers_RJ, distribution_RJV)[:, 1:]
    bins_RJ = np.minimum((u_RJ * 64).astype(int), 63)
    pairs_P2 = (bins_RJ // 8)[:, : u_RJ.shape[1] // 2 * 2].reshape(-1, 2)  # disjoint, so that they are independent
    before_N, token_N, distribution_NV = (
        answers_RJ[:, :-1].ravel(),
        answers_RJ[:, 1:].ravel(),
        distribution_RJV[:, 1:].reshape(-1, V),
    )
    after_token = [sum_of_draws(token_N[before_N == v], distribution_NV[before_N == v]) for v in range(V)]
    return Fit(
        after_prefix=pooled(after_prefix),
        tokens=pooled([sum_of_draws(token_N, distribution_NV)]),
        after_token=pooled(after_token),
        uniform=p_value((np.bincount(bins_RJ.ravel(), minlength=64), np.ones(64))),
        pairs=p_value((np.bincount(pairs_P2 @ [8, 1], minlength=64), np.ones(64))),
    )


def pooled(statistics: Sequence[tuple[float, int]]) -> float:
    """P-value of independent statistics with their degrees of freedom."""
    statistic, freedom = np.sum(statistics, axis=0)
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def _after_prefix(prefix_Rj: np.ndarray, token_R: np.ndarray, distribution_RV: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom over all prefixes."""
    _, first_P, group_R = np.unique(prefix_Rj, axis=0, return_index=True, return_inverse=True)
    counts_PV = np.bincount(group_R.ravel() * V + token_R, minlength=len(first_P) * V).reshape(-1, V)
    parts = [
        pearson(counts, distribution) for counts, distribution in zip(counts_PV, distribution_RV[first_P], strict=True)
    ]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def sum_of_draws(token_N: np.ndarray, distribution_NV: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom of tokens drawn from known distributions, however seldom a distribution comes
    back: the distance of their counts from the sum of the distributions, in units of its covariance, follows the
    chi-square distribution."""
    often_V = distribution_NV.sum(axis=0) >= MIN_EXPECTED
    if not often_V.any():
        return 0.0, 0
    distribution_NV = distribution_NV[:, often_V]
    difference_V = np.bincount(token_N, minlength=len(often_V))[often_V] - distribution_NV.sum(axis=0)
    covariance_VV = np.diag(distribution_NV.sum(axis=0)) - distribution_NV.T @ distribution_NV
    inverse_VV = np.linalg.pinv(covariance_VV, rcond=1e-9, hermitian=True)
    rank = np.linalg.matrix_rank(covariance_VV, rtol=1e-9, hermitian=True)
    return float(difference_V @ inverse_VV @ difference_V), int(rank)


def _mass_before(answers_RJ: np.ndarray, distribution_RJV: np.ndarray) -> np.ndarray:
    """Of the tokens likelier than the emitted one, plus a random part of its own: uniform if it was drawn from the
    distribution, and independent of all other tokens."""
    order = np.argsort(-distribution_RJV, axis=-1)
    best_first = np.take_along_axis(distribution_RJV, order, axis=-1)
    rank = (order == answers_RJ[..., None]).argmax(axis=-1)[..., None]
    own = np.take_along_axis(best_first, rank, axis=-1)[..., 0]
    before = np.take_along_axis(best_first.cumsum(axis=-1), rank, axis=-1)[..., 0] - own
    return before + own * np.random.default_rng(0).random(own.shape)


def check_greedy_in_a_mixed_batch(engine: Any, toy: Toy) -> None:
    """Greedy requests give Hugging Face's argmax, alone and among sampled ones."""
    prompts = [list(prompt) for prompt in PROMPTS]
    alone = [answer["output_ids"] for answer in generate(engine, prompts, 24, ignore_eos=True)]
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        assert toy.logits(prompt, np.array([answer])).argmax(axis=-1).tolist() == [answer]
    hot = {"temperature": 1.5, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True}
    cold = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    mixed = engine.generate(input_ids=prompts * 2 + prompts, sampling_params=[hot, cold] * 4 + [cold] * 4)
    assert [mixed[i]["output_ids"] for i in range(8, 12)] == alone
    assert [mixed[i]["output_ids"] for i in range(1, 8, 2)] == [alone[i % 4] for i in range(1, 8, 2)]


def check_seeds(engine: Any, count: int, **sampling: Any) -> None:
    """A seeded request gives the same answer alone, among others, and again; another seed gives another answer."""
    prompt = list(PROMPTS[1])
    options = [{"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True} | sampling for _ in range(count)]
    seeded = [o | {"sampling_seed": 1000 + i} for i, o in enumerate(options)]

    def answers(options: list[dict[str, Any]]) -> list[list[int]]:
        out = engine.generate(input_ids=[prompt] * len(options), sampling_params=options)
        return [answer["output_ids"] for answer in out]

    together = answers(seeded)
    assert len({tuple(answer) for answer in together}) > count // 2
    among_unseeded = answers([o for pair in zip(options, seeded, strict=True) for o in pair])
    assert among_unseeded[1::2] == together
    assert [answers([option])[0] for option in seeded[:3]] == together[:3]
    assert answers(options) != answers(options), "requests without a seed stay random"
