"""Which algorithm serves a drafter, and what SGLang is told of ours before an engine starts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_models import DRAFTERS
from test_last_hidden import PATHS, TARGET, make_drafter

from sglang_ext.adapter.algorithms import algorithm_of, checked_info
from sglang_ext.adapter.engine import engine_arguments
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import StaticTree


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    for kind in ("medusa", "hydra", "hydra++"):
        drafter = make_drafter(kind)
        save_drafter(folder / "chain", drafter, TARGET)
        drafter.draft_tree = StaticTree(PATHS)
        save_drafter(folder / kind, drafter, TARGET)
    drafter = make_drafter("medusa")
    drafter.draft_tree = SlimTree(SlimOptions(correlation=False), TARGET.vocab_size)
    save_drafter(folder / "slim", drafter, TARGET)
    return {name: folder / name for name in ("chain", "medusa", "hydra", "hydra++", "slim")}


def test_algorithm_of_a_drafter(folders: dict[str, Path]) -> None:
    assert algorithm_of(DRAFTERS["full"], 1) == algorithm_of("some/stock-drafter", 4) == "EAGLE3"
    assert [algorithm_of(folders[name], 1) for name in ("medusa", "slim", "hydra")] == ["BPD", "BPD", "HYDRA"]
    assert [algorithm_of(folders[name], 4) for name in ("medusa", "slim", "hydra")] == ["MEDUSA", "SLIM", "HYDRA"]
    arguments = engine_arguments("target", str(folders["slim"]), draft_steps=3, topk=4, num_draft_tokens=9)
    assert arguments["speculative_algorithm"] == "SLIM"


@pytest.mark.parametrize(
    ("algorithm", "name", "message"),
    [
        ("MEDUSA", "hydra", "serves drafters of kind medusa, but .* is of kind hydra; use HYDRA"),
        ("MEDUSA", "slim", "serves trees of kind static, but that of .* is of kind slim; use SLIM"),
        ("SLIM", "medusa", "serves trees of kind slim, but that of .* is of kind static; use MEDUSA"),
        ("BPD", "hydra", "is of kind hydra; use HYDRA"),
    ],
)
def test_a_drafter_of_another_algorithm_is_refused(
    folders: dict[str, Path], algorithm: str, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        checked_info(str(folders[name]), algorithm)


def test_an_unknown_tree_is_served_by_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["medusa"] / "config.json").read_text())
    config["draft_tree"]["kind"] = "oak"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"draft_tree\.kind must be one of static, slim, got 'oak'"):
        algorithm_of(tmp_path, 4)


def resolved(algorithm: str, drafter: Path | None, **given: Any) -> Any:
    """What SGLang's arguments are after ours has seen them."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()  # as every process of SGLang does
    arguments = SimpleNamespace(
        speculative_draft_model_path=None if drafter is None else str(drafter),
        speculative_num_steps=None,
        speculative_eagle_topk=None,
        speculative_num_draft_tokens=None,
        speculative_adaptive=False,
        speculative_use_rejection_sampling=False,
        speculative_use_block_verification=False,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
        pp_size=1,
        enable_dp_attention=False,
        page_size=None,
        max_running_requests=None,
    )
    vars(arguments).update(given)
    SpeculativeAlgorithm.from_string(algorithm).handle_server_args(arguments)
    found = arguments.speculative_num_steps, arguments.speculative_eagle_topk, arguments.speculative_num_draft_tokens
    return found


def test_what_is_left_out_comes_from_the_drafter(folders: dict[str, Path]) -> None:
    assert resolved("BPD", folders["slim"]) == (3, 1, 4)
    assert resolved("MEDUSA", folders["medusa"]) == (3, 10, len(PATHS) + 1)
    assert resolved("MEDUSA", folders["medusa"], speculative_eagle_topk=2) == (3, 2, 6)  # one path needs a third
    assert resolved("SLIM", folders["slim"]) == (3, 10, 61)  # 20 hypotheses that share no beginning
    assert resolved("HYDRA", folders["hydra"], speculative_eagle_topk=1, speculative_num_steps=2) == (2, 1, 3)
    assert resolved("SLIM", folders["slim"], speculative_eagle_topk=4, speculative_num_draft_tokens=9) == (3, 4, 9)


@pytest.mark.parametrize(("name", "has_cache"), [("medusa", False), ("hydra", False), ("hydra++", True)])
def test_an_algorithm_says_of_its_drafter_whether_it_has_a_cache(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, has_cache: bool
) -> None:
    """A policy lets such a drafter rest, and a drafter without one never."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ext.adapter import spec_algorithm

    load_plugins()
    spec = SimpleNamespace(speculative_draft_model_path=str(folders[name]))
    monkeypatch.setattr(spec_algorithm, "get_spec", lambda: spec)
    assert SpeculativeAlgorithm.from_string(algorithm_of(folders[name], 4)).has_draft_kv() is has_cache


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"speculative_num_steps": 4}, r"--speculative-num-steps must be in 1\.\.3"),
    "adaptive": ({"speculative_adaptive": True}, "does not offer --speculative-adaptive"),
    "pages": ({"page_size": 16}, "does not offer --page-size above 1 .--attention-backend triton or flashinfer"),
    "thresholds": (
        {"speculative_use_rejection_sampling": True, "speculative_accept_threshold_single": 0.5},
        r"--speculative-accept-threshold-single does not go with drawn drafts \(got 0\.5\); leave it at 1\.0",
    ),
    "pipeline": ({"pp_size": 2}, "does not offer --pp-size above 1"),
    "attention": ({"enable_dp_attention": True}, "does not offer --enable-dp-attention"),
    "blocks": ({"speculative_use_block_verification": True}, "use-block-verification with a tree"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_refused(folders: dict[str, Path], case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        resolved("MEDUSA", folders["medusa"], **given)


def test_a_drafter_must_be_named_and_bpd_is_a_chain(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="needs a drafter: --speculative-draft-model-path"):
        resolved("MEDUSA", None)
    with pytest.raises(ValueError, match="drafts a chain; leave --speculative-eagle-topk out"):
        resolved("BPD", folders["medusa"], speculative_eagle_topk=4)


def test_a_tree_may_be_drawn_unless_it_depends_on_the_drafts(folders: dict[str, Path]) -> None:
    drawn = {"speculative_use_rejection_sampling": True}
    assert resolved("MEDUSA", folders["medusa"], **drawn) == resolved("MEDUSA", folders["medusa"])
    with pytest.raises(ValueError, match="a draft_tree of kind slim has depends on the drafted tokens"):
        resolved("SLIM", folders["slim"], **drawn)


def test_a_chain_may_be_drawn(folders: dict[str, Path]) -> None:
    assert resolved("BPD", folders["medusa"], speculative_use_rejection_sampling=True) == (3, 1, 4)
