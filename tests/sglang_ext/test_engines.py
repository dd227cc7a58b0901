"""Real engines of every family, tree and head: token-identical to plain decoding, and live swap.

`ENGINES` says what is met. `make test` gives all prompts to the first drafter of each engine and fewer to the others;
of the engines whose tree and worker others show (`is_slow`) it tries nothing more.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, generate, kept_engine
from fixture_models import DRAFTERS
from last_hidden_cases import DEMO, as_answers
from lossless import (
    check_counts,
    check_grammar,
    check_greedy_identity,
    check_long_and_one_token_prompts,
    check_sampling_path,
    check_step_clock,
    check_stops,
    check_streaming,
    check_swap_and_its_refusals,
    with_weights_of,
)
from trained_drafters import EAGLE3_NODES, EAGLE3_TREES, FEATURE_HEADS
from volume import volume

from rayspec.training.acceptance import verify_steps
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.tree_acceptance import accepted_drafts
from sglang_ext.adapter.engine import step_times, swap_drafter
from sglang_ext.drafters import family
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.trees import Proposer
from sglang_ext.trees.static import StaticProposer, StaticTree, chain_paths

DraftersOf = Callable[[str], dict[str, Path]]


@dataclass(frozen=True)
class Engine:
    """The first of `drafters` is what it starts with; `lossless` are those that meet everything that must hold."""

    family: str
    drafters: Sequence[str]
    lossless: Sequence[str] = ()
    shape: dict[str, Any] = field(default_factory=dict)
    draft_steps: int = 3
    is_slow: bool = False


TREE = {"topk": 4, "num_draft_tokens": EAGLE3_NODES}
SLIM = {"topk": 8, "num_draft_tokens": 20}
EAGLE = [*FEATURE_HEADS, "pruned"]
ENGINES: dict[str, Engine] = {
    "eagle3_chain": Engine("eagle3", [*DRAFTERS], ["full"], {"enable_custom_logit_processor": True}, draft_steps=4),
    "eagle3_tree": Engine("eagle3", [*EAGLE3_TREES, "eagle2", *DRAFTERS], ["full", "s"], TREE, draft_steps=4),
    # no draft decode pass exists, the one draft comes from the extend after verification
    "eagle3_one_step": Engine("eagle3", ["slimspec"], draft_steps=1),
    "eagle_chain": Engine("eagle", EAGLE, ["truncated"]),
    "eagle_tree": Engine("eagle", EAGLE, ["truncated"], TREE, is_slow=True),
    "independent_chain": Engine("independent", [*FEATURE_HEADS], ["truncated"]),
    "independent_tree": Engine("independent", [*FEATURE_HEADS], ["truncated"], TREE, is_slow=True),
    "last_hidden_chain": Engine("last_hidden", [*DEMO], ["hydra"], is_slow=True),  # BPD for Medusa's
    "last_hidden_tree": Engine("last_hidden", ["hydra", *DEMO, "slim", "slim_zero"], ["hydra"], TREE),
    "last_hidden_slim": Engine("last_hidden", ["slim", "slim_zero", *DEMO], ["hydra"], SLIM, is_slow=True),
    "hydra_prefix_tree": Engine("hydra_prefix", ["slimspec", "truncated"], ["slimspec"], TREE),
    "hydra_prefix_chain": Engine("hydra_prefix", ["slimspec", "truncated"], ["slimspec"], is_slow=True),
    # which drafts fewer than it was made for
    "specformer_chain": Engine("specformer", ["specformer", "truncated", "routed"], ["specformer"]),
}


def met(
    drafters: Callable[[Engine], Sequence[str]], *only: str, always_the_first: bool = False
) -> pytest.MarkDecorator:
    """Every engine (or `only` these) with these drafters of it; `always_the_first` also where the engine is slow."""

    def case(name: str, engine: Engine, drafter: str) -> Any:
        is_slow = engine.is_slow and not (always_the_first and drafter == engine.drafters[0])
        return pytest.param(name, drafter, marks=pytest.mark.slow if is_slow else (), id=f"{name}-{drafter}")

    cases = [
        case(name, engine, drafter)
        for name, engine in ENGINES.items()
        for drafter in dict.fromkeys(drafters(engine))
        if not only or name in only
    ]
    return pytest.mark.parametrize(("engine", "drafter"), cases, indirect=True)


lossless = met(lambda engine: engine.lossless)


@pytest.fixture
def drafters(request: pytest.FixtureRequest, drafters_of: DraftersOf) -> dict[str, Path]:
    return drafters_of(asked_of(request).family)


@pytest.fixture
def engine(request: pytest.FixtureRequest, drafters: dict[str, Path]) -> Any:
    asked = asked_of(request)
    return kept_engine(drafters[asked.drafters[0]], draft_steps=asked.draft_steps, **asked.shape)


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Engine:
    return asked_of(request)


def asked_of(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.node.callspec.params["engine"]]


@pytest.fixture
def drafter(request: pytest.FixtureRequest, engine: Any, drafters: dict[str, Path]) -> Path:
    """What the engine drafts with in a test, whatever the tests before it swapped in."""
    swap_drafter(engine, str(drafters[request.param]))
    return drafters[request.param]


@met(lambda engine: engine.drafters, always_the_first=True)
def test_greedy_identity(
    request: pytest.FixtureRequest, engine: Any, drafter: Path, asked: Engine, prompts: list[Ids], oracle: Oracle
) -> None:
    name = request.node.callspec.params["drafter"]
    answers = check_greedy_identity(engine, prompts, oracle, is_first=name == asked.drafters[0])
    if "routed" not in name:  # by a router that knows nothing
        check_counts(answers, asked.draft_steps)


@lossless
def test_stop_inside_of_a_block(engine: Any, drafter: Path, prompts: list[Ids], oracle: Oracle) -> None:
    check_stops(engine, prompts, oracle)


@lossless
def test_streaming(engine: Any, drafter: Path, prompts: list[Ids], oracle: Oracle) -> None:
    check_streaming(engine, prompts, oracle)


@lossless
def test_long_and_one_token_prompts(
    engine: Any, drafter: Path, long_prompt: Ids, prompts: list[Ids], oracle: Oracle
) -> None:
    check_long_and_one_token_prompts(engine, long_prompt, prompts, oracle)


@lossless
def test_sampling_path(engine: Any, drafter: Path, prompts: list[Ids], oracle: Oracle) -> None:
    check_sampling_path(engine, prompts, oracle)


@lossless
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 40, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_a_grammar_holds_in_drafted_tokens(
    engine: Any, drafter: Path, prompts: list[Ids], sampling: dict[str, Any]
) -> None:
    check_grammar(engine, prompts, sampling)


@lossless
def test_step_clock_splits_the_step(
    request: pytest.FixtureRequest, engine: Any, drafter: Path, prompts: list[Ids]
) -> None:
    check_step_clock(engine, drafter, prompts, is_pruned=request.node.callspec.params["drafter"] == "s")


@met(lambda engine: ["dynaspec"], "eagle3_chain")
def test_a_draft_step_has_five_parts(engine: Any, drafter: Path, prompts: list[Ids]) -> None:
    """DynaSpec's Fig. 1: looking up tokens, routing, choosing clusters, scoring them, and the body."""
    before = step_times(engine)
    generate(engine, prompts[:4])
    after = step_times(engine)
    assert before is not None
    assert after is not None
    spent = after - before
    assert spent.routing_s > 0
    assert 0 < spent.choice_s < spent.head_s - spent.routing_s
    assert 0 < spent.embedding_s < spent.draft_s - spent.head_s


# by family: what is swapped for what; (message, drafter, whose weights its folder holds); (message, drafter) of others
SWAPS: dict[str, tuple[str, str, tuple[str, str, str], Mapping[str, str]]] = {
    "eagle3": ("full", "slimspec", (r"missing lm_head\.up", "slimspec", "full"), {}),
    "eagle": ("full", "routed", (r"missing lm_head\.up", "slimspec", "full"), {}),
    "independent": ("full", "routed", (r"missing lm_head\.weight", "full", "slimspec"), {}),
    "last_hidden": (
        *("medusa", "hydra", (r"missing lm_head\.0\.bias", "hydra", "medusa_truncated")),
        {"of kind hydra with a layer that has a cache needs another worker": "hydra_prefix"},
    ),
    "hydra_prefix": (
        *("slimspec", "truncated", (r"missing lm_head\.0\.down", "slimspec", "truncated")),
        {r"its body .*mlp_layers=1.* differs": "short_mlp", r"its body .*layer=None.* differs": "no_prefix"},
    ),
    "specformer": (
        *("specformer", "truncated", (r"missing lm_head\.down", "specformer", "truncated")),
        {r"its body .* differs": "causal"},
    ),
}


@met(lambda engine: [SWAPS[engine.family][0]], *(name for name in ENGINES if name != "eagle3_one_step"))
def test_swap_and_its_refusals(
    engine: Any,
    drafter: Path,
    asked: Engine,
    drafters: dict[str, Path],
    tmp_path: Path,
    prompts: list[Ids],
    oracle: Oracle,
) -> None:
    first, other, (missing, broken, weights), more = SWAPS[asked.family]
    faulty = {missing: with_weights_of(drafters[broken], drafters[weights], tmp_path / "faulty")}
    faulty |= {message: drafters[name] for message, name in more.items()}
    if asked.family != "eagle3":
        faulty["a drafter of kind eagle3 needs another worker"] = DRAFTERS["full"]
    check_swap_and_its_refusals(engine, drafters, first, other, faulty, prompts, oracle)


@met(lambda engine: ["full", "truncated"], "eagle_chain")
def test_the_engine_accepts_what_training_says(
    engine: Any, drafter: Path, asked: Engine, demo_target: FrozenTarget, prompts: list[Ids], oracle: Oracle
) -> None:
    """Each request takes as many verify steps as teacher forcing over its answer says: features, embeddings, positions
    and cache are training's."""
    some = prompts[: volume(len(prompts), 24)]
    found = [a["meta_info"]["spec_verify_ct"] for a in generate(engine, some)]
    answers, sizes = as_answers(some, oracle.answers[: len(some)]), {"batch_size": 16, "chunk_rows": 256}
    assert found == verify_steps(load_drafter(drafter)[0], demo_target, answers, num_steps=asked.draft_steps, **sizes)


CACHED = {"specformer_chain": "specformer", "hydra_prefix_chain": "slimspec", "hydra_prefix_tree": "slimspec"}


@pytest.mark.parametrize(
    ("engine", "drafter"),
    [pytest.param(*case, marks=pytest.mark.slow if ENGINES[case[0]].is_slow else ()) for case in CACHED.items()],
    indirect=True,
)
@torch.no_grad()
def test_the_cache_holds_what_recomputing_gives(
    engine: Any, drafter: Path, asked: Engine, demo_target: FrozenTarget, prompts: list[Ids], oracle: Oracle
) -> None:
    """Every draft, a chain or a tree, is that of the whole context without a cache, after any number of rejected tokens
    and with a prefix of another request's: as many verify steps, as many accepted drafts."""
    module, _ = load_drafter(drafter)
    proposer = proposer_of(module, asked)
    for prompt, answer in zip(prompts[:12], oracle.answers, strict=False):
        ids_L, last = torch.tensor([*prompt, *answer]), len(prompt) + len(answer) - 1
        carried_LH = family(module.kind).training.carried(module, demo_target, ids_L[None])[0][0]
        root_B = torch.arange(len(prompt), last)  # the first was named by the prompt's own pass
        draft = proposer.propose(module, carried_LH[root_B - 1], ids_L[root_B], demo_target.embed)
        unknown_K = torch.full((asked.draft_steps,), -1)  # what comes behind the known answer is accepted nowhere
        right_B = accepted_drafts(draft, torch.cat([ids_L, unknown_K]), root_B).tolist()
        place, steps, accepted = len(prompt), 0, 0
        while place < last:
            right = right_B[place - len(prompt)]
            place, steps, accepted = place + 1 + right, steps + 1, accepted + right
        info = generate(engine, [prompt])[0]["meta_info"]
        assert info["spec_verify_ct"] == steps
        assert 0 <= info["spec_num_correct_drafts"] - accepted <= asked.draft_steps  # the last block may go past it


def proposer_of(module: Any, asked: Engine) -> Proposer:
    if "topk" not in asked.shape:
        return StaticProposer(chain_paths(asked.draft_steps), torch.device("cpu"))
    return module.draft_tree.fit(
        asked.draft_steps, asked.shape["topk"], asked.shape["num_draft_tokens"], torch.device("cpu")
    )


def steps_of(engine: Any, drafter: Path, prompts: list[Ids]) -> list[tuple[list[int], list[int]]]:
    """(tokens, how often 0, 1, .. drafts were accepted) of each prompt."""
    swap_drafter(engine, str(drafter))
    answers = generate(engine, prompts)
    return [(a["output_ids"], a["meta_info"]["spec_correct_drafts_histogram"]) for a in answers]


@met(lambda engine: ["full"], "eagle3_tree")
def test_without_correlation_it_is_eagle2_and_a_swap_changes_the_tree(
    engine: Any, drafter: Path, drafters: dict[str, Path], prompts: list[Ids]
) -> None:
    some = prompts[: volume(56, 10)]
    found = {name: steps_of(engine, drafters[name], some) for name in ("full", "eagle2", "s", "zero")}
    again = steps_of(engine, drafter, some)
    assert found["full"] == found["eagle2"] == again
    assert found["full"] != found["s"] != found["zero"]


@met(lambda engine: ["s"], "eagle3_tree")
def test_a_tree_that_does_not_fit_is_refused_and_changes_nothing(
    engine: Any, drafter: Path, drafters: dict[str, Path], tmp_path: Path, prompts: list[Ids]
) -> None:
    some = prompts[: volume(16, 6)]
    before = steps_of(engine, drafter, some)
    module, info = load_drafter(drafters["eagle2"])
    assert info.target is not None
    save_drafter(tmp_path / "faulty", module, info.target, share_with=DRAFTERS["full"])
    config = json.loads((tmp_path / "faulty" / "config.json").read_text())
    config["draft_tree"] = StaticTree([[0], [1]]).spec()
    (tmp_path / "faulty" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"draft_tree\.kind 'static' does not fit a drafter of kind eagle3"):
        swap_drafter(engine, str(tmp_path / "faulty"))
    after = [(a["output_ids"], a["meta_info"]["spec_correct_drafts_histogram"]) for a in generate(engine, some)]
    assert after == before
