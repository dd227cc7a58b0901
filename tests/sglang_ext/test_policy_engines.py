"""Engines whose draft length changes at every step: token-identical to plain decoding, for every family and shape."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import NEW_TOKENS, Ids, Oracle, generate, output_ids, running_engine
from faults import switch_at_random
from fixture_models import DRAFTERS, drafter_folder
from policy_cases import ALWAYS, write_policy
from volume import volume

from sglang_ext.adapter.engine import policy_report, swap_drafter

STEPS = 3
FEW = volume(40, 8)
TREE = {"topk": 4, "num_draft_tokens": 12}
WIDE_TREE = {"topk": 8, "num_draft_tokens": 9}  # drafts more slots than twice its nodes
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3_chain": ("full", {}),
    "eagle3_tree": ("full", TREE),
    "eagle3_wide_tree": ("full", WIDE_TREE),
    "eagle_chain": ("eagle", {}),
    "standalone_chain": ("independent", {}),
    "standalone_tree": ("independent", TREE),
    "last_hidden_chain": ("medusa", {}),
    "last_hidden_tree": ("hydra", TREE),
    "specformer": ("specformer", {}),
    "hydra_prefix_chain": ("hydra_prefix", {}),
    "hydra_prefix_tree": ("hydra_prefix", TREE),
}


def folder_of(name: str, request: pytest.FixtureRequest) -> Path:
    if name in ("independent", "eagle"):
        return request.getfixturevalue("drafters_of")(name)["full"]
    if name == "hydra_prefix":
        return request.getfixturevalue("drafters_of")(name)["slimspec"]
    return drafter_folder(name)


QUICK = "eagle3_chain"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in ENGINES]
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    name, shape = ENGINES[request.param]
    lengths = [0, STEPS] if shape else range(STEPS + 1)
    file = write_policy(tmp_path_factory.mktemp("policy") / "policy.json", lengths, **ALWAYS)
    options = {"draft_steps": STEPS, "speculative_adaptive_config": file, "enable_custom_logit_processor": True} | shape
    with running_engine(folder_of(name, request), **options) as engine:
        switch_at_random(engine)
        yield engine


def test_greedy_identity(request: pytest.FixtureRequest, engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    case = request.node.callspec.params["engine"]
    # `make test` leaves the other heads to test_engines.py, under lengths that stay
    some = [*DRAFTERS.items()][: volume(len(DRAFTERS), 4)]
    names = {str(path): name for name, path in some} if case == "eagle3_chain" else {}
    for folder, name in (names or {str(folder_of(ENGINES[case][0], request)): case}).items():
        swap_drafter(engine, folder)
        answers = generate(engine, prompts[:FEW])
        assert output_ids(answers) == oracle.answers[:FEW], name
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0, name
    for prompt, expected in zip(prompts[:4], oracle.answers, strict=False):  # alone, on a warm prefix cache
        assert output_ids(generate(engine, [prompt])) == [expected]
    report = policy_report(engine)
    assert report is not None
    assert report["lost"] == 0
    total = sum(report["steps"].values())
    assert min(report["steps"].values()) > total / 10, report["steps"]
    assert report["switches"] > total / 4
    assert (report["rested"] > 0) == (not case.startswith("last_hidden")), "these have no cache to fill"


def test_sampled_requests_among_greedy_ones(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    sampling = [{"temperature": t, "top_p": 0.9, "max_new_tokens": NEW_TOKENS, "ignore_eos": True} for t in (1.0, 0.0)]
    answers = engine.generate(input_ids=prompts[:16], sampling_params=sampling * 8)
    assert {len(answer["output_ids"]) for answer in answers} == {NEW_TOKENS}
    assert output_ids(answers[1::2]) == oracle.answers[1:16:2]


@pytest.mark.parametrize("case", ["specformer", pytest.param("hydra_prefix_tree", marks=pytest.mark.slow)])
def test_drawn_requests_join_those_that_rest(
    case: str, request: pytest.FixtureRequest, prompts: list[Ids], tmp_path: Path
) -> None:
    """Of families that carry a hidden state and no drafts from step to step: what a rest stands in with is merged with
    what a prefill hands on."""
    name, shape = ENGINES[case]
    file = write_policy(tmp_path / "policy.json", [0, STEPS], **ALWAYS)
    options = {"draft_steps": STEPS, "speculative_adaptive_config": file, "enable_custom_logit_processor": True}
    exact = {"speculative_use_rejection_sampling": True, "max_running_requests": 4}
    with running_engine(folder_of(name, request), **options, **exact, **shape) as engine:
        switch_at_random(engine)
        lengths = [8 + 5 * (n % 5) for n in range(16)]  # so that the first are done while others are not
        sampling = [{"temperature": n % 2, "max_new_tokens": m, "ignore_eos": True} for n, m in enumerate(lengths)]
        answers = engine.generate(input_ids=prompts[:16], sampling_params=sampling)
        assert [len(answer["output_ids"]) for answer in answers] == lengths
        report = policy_report(engine)
        assert report is not None
        assert report["rested"] > 0
