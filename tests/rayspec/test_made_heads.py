"""Heads that a sweep makes itself: what `heads` of a config may say, and what then lies on the disk."""

import json
import shutil
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from answerers import answer_in_process
from fixture_models import CALIBRATIONS, DRAFTERS, HIDDEN, PROMPTS, TARGET, drafter_folder, prompt_texts
from safetensors.torch import load_file

from rayspec.artifacts import load_artifacts
from rayspec.commands.sweep import main
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.head_entry import combinations, label
from rayspec.sweep.plan.made_heads import MadeHead, measured_moments
from rayspec.sweep.plan.prepare import Prepared, prepare
from rayspec.sweep.record.folder import SweepFolder
from rayspec.training.data.answers import AnswersConfig, read_answers
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.moments import head_moments
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.settings import build

FULL = str(DRAFTERS["full"])
VOCABTRIM, GROUPS, CLUSTERS = (str(CALIBRATIONS / name) for name in ("vocabtrim-2048", "groups-8", "clusters-128"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def prepared(*heads: dict[str, Any], **fields: Any) -> Prepared:
    base: dict[str, Any] = {"target": str(TARGET), "drafters": [FULL], "workload": f"{PROMPTS}:4", "draft_steps": [2]}
    return prepare(build(SweepConfig, {**base, "heads": list(heads), **fields}))


def made(*heads: dict[str, Any], **fields: Any) -> list[MadeHead]:
    found = prepared(*heads, **fields)
    found.make_heads()
    return list(found.heads)


def files(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in sorted(folder.rglob("*")) if file.is_file()}


def test_lists_are_multiplied_out_in_a_head_in_a_head_too() -> None:
    entry = {"kind": "rdk", "base": {"kind": "truncated", "size": [512, 1024]}, "neighbours": [4, 8], "artifacts": "v"}
    found = combinations(entry, "heads[0]")
    assert [(f["base"]["size"], f["neighbours"]) for f in found] == [(512, 4), (512, 8), (1024, 4), (1024, 8)]
    assert label({k: v for k, v in found[0].items() if k != "artifacts"}, "/x/v", "other") == (
        "rdk-truncated-size512-neighbours4-v-on-other"
    )


def test_a_size_that_is_left_out_is_the_calibrations() -> None:
    """Also null, and whatever comes first in the entry."""
    entry = {"kind": "truncated", "artifacts": VOCABTRIM}
    absent, null, written = (prepared({**s, **entry}).heads for s in ({}, {"size": None}, {"size": 2048}))
    assert absent == written
    assert null == written
    assert absent[0].label == "truncated-size2048-vocabtrim-2048"
    assert absent[0].info.head.spec() == {"kind": "truncated", "size": 2048, "step_sizes": None}


def test_an_option_that_is_a_list_is_one_value_and_a_list_of_lists_several() -> None:
    one = {"kind": "truncated", "size": 512, "step_sizes": [512, 512, 128]}
    assert combinations(one, "heads[0]") == [one]
    several = combinations({**one, "step_sizes": [[512, 512, 128], [512, 256]]}, "heads[0]")
    assert [s["step_sizes"] for s in several] == [[512, 512, 128], [512, 256]]


def test_one_entry_is_a_candidate_for_each_value(home: Path) -> None:
    found = prepared({"kind": "slimspec", "rank": [16, 32, 64]}, draft_steps=[2, 4])
    ranks = [(c.label, c.head.numbers, c.draft_steps, c.base) for c in found.plan.candidates if c.label != "full"]
    assert ranks == [
        (f"slimspec-rank{rank}", {"rank": rank}, steps, "full") for steps in (2, 4) for rank in (16, 32, 64)
    ]
    assert len({c.engine for c in found.plan.candidates}) == 2, "all of equal draft steps are swapped in one engine"
    text = found.describe()
    assert f"- slimspec-rank16: kind=slimspec, rank=16 on {FULL} -> {home}/heads/target/slimspec-rank16-" in text
    assert text.count(": to make") == 3
    assert not home.exists(), "a plan writes nothing"


def test_a_factored_head_is_the_full_one_where_its_rank_is_and_shares_the_body() -> None:
    (head,) = made({"kind": "slimspec", "rank": HIDDEN})
    drafter, info = load_drafter(head.info.path)
    base, _ = load_drafter(FULL)
    matrix, _ = drafter.lm_head.at(0).as_matrix() or pytest.fail("it has one")
    want = base.lm_head.at(0).get_parameter("weight")
    assert (matrix - want).norm() / want.norm() < 0.02  # both factors are stored in bfloat16
    assert {name.partition(".")[0] for name in load_file(Path(head.info.path) / "model.safetensors")} == {"lm_head"}
    assert (Path(head.info.path) / info.shares[0].drafter).resolve() == Path(FULL)


def test_a_smaller_rank_is_the_best_approximation() -> None:
    heads = made({"kind": "slimspec", "rank": [16, 64]})
    want = load_drafter(FULL)[0].lm_head.at(0).get_parameter("weight").detach()
    values = torch.linalg.svdvals(want)
    for head, rank in zip(heads, (16, 64), strict=True):
        matrix, _ = load_drafter(head.info.path)[0].lm_head.at(0).as_matrix() or pytest.fail("it has one")
        least = values[rank:].square().sum().sqrt()
        assert float((matrix - want).norm() / least) == pytest.approx(1, abs=0.01)


def test_a_truncated_head_holds_the_first_tokens_of_the_calibration() -> None:
    (head,) = made({"kind": "truncated", "size": 300, "artifacts": VOCABTRIM})
    lm_head = load_drafter(head.info.path)[0].lm_head.at(0)
    ids = load_artifacts(VOCABTRIM)[0]["ids"][:300].sort().values
    assert torch.equal(lm_head.get_buffer("ids"), ids)
    base = load_drafter(FULL)[0].lm_head.at(0)
    assert torch.equal(lm_head.get_parameter("weight"), base.get_parameter("weight")[ids])
    assert read_info(head.info.path).provenance["calibration"]["name"] == "vocabtrim-2048"


def test_fewer_bits_of_the_full_head_and_of_a_trained_one() -> None:
    heads = made(
        {"kind": "full", "weight_format": ["int8", "int4"]},
        {"kind": "slimspec", "drafter": str(DRAFTERS["slimspec"]), "weight_format": "int8"},
    )
    assert [h.label for h in heads] == ["full-int8", "full-int4", "slimspec-int8-on-slimspec-r32"]
    full = load_drafter(FULL)[0].lm_head.at(0)
    hidden_TH = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    want = full.target_logits(hidden_TH)
    for head, most in zip(heads[:2], (0.02, 0.2), strict=True):
        got = load_drafter(head.info.path)[0].lm_head.at(0).target_logits(hidden_TH)
        assert 0 < float(((got - want).norm() / want.norm()).detach()) < most
    slim = load_drafter(heads[2].info.path)[1].head.spec()
    assert (slim["rank"], slim["weight_format"]) == (32, "int8"), "what is not said is the trained head's"


def test_clusters_of_a_trained_router_and_groups_without_one() -> None:
    routed, grouped = made(
        {"kind": "dynaspec", "drafter": str(DRAFTERS["dynaspec"]), "first": 8, "later": 4},
        {"kind": "coral", "clusters": 8, "top": 2, "artifacts": GROUPS},
    )
    trained = load_drafter(DRAFTERS["dynaspec"])[0].lm_head.state_dict()
    drafter, info = load_drafter(routed.info.path)
    assert all(torch.equal(t, trained[name]) for name, t in drafter.lm_head.state_dict().items())
    assert (info.head.spec()["first"], info.head.spec()["clusters"]) == (8, 128)
    assert load_drafter(grouped.info.path)[1].head.spec()["top"] == 2


def test_a_drafter_with_a_tree_keeps_it() -> None:
    base = drafter_folder("medusa")
    spec = read_info(base).head
    entry = {"kind": spec.kind, "drafter": f"{base}@4x8", "weight_format": "int8"}
    (head,) = made(entry, drafters=[FULL, f"{base}@4x8"], draft_steps=[3])
    assert head.label == "truncated-int8-on-medusa@4x8"
    tree, want = (load_drafter(folder)[0].draft_tree for folder in (head.info.path, base))
    assert tree is not None
    assert want is not None
    assert all(torch.equal(t, want.state_dict()[name]) for name, t in tree.state_dict().items())


def test_a_second_run_makes_nothing_and_a_changed_base_something_else(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "drafters" / "full"
    shutil.copytree(FULL, base)
    entry = {"kind": "slimspec", "rank": [16, 32]}
    (first, second) = made(entry, drafters=[str(base)])
    assert capsys.readouterr().out == "making slimspec-rank16\nmaking slimspec-rank32\n"
    before = files(home)
    again = prepared(entry, drafters=[str(base)])
    again.make_heads()
    assert again.heads == (first, second)
    assert files(home) == before
    assert again.describe().count(": already made") == 2
    assert capsys.readouterr().out == ""

    weights = Path(second.info.path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])  # as a copy that was cut off
    (_, mended) = made(entry, drafters=[str(base)])
    assert capsys.readouterr().out == "making slimspec-rank32\n"
    assert mended == second
    assert weights.read_bytes() == whole

    config = json.loads((base / "config.json").read_text())
    config["rayspec"]["recipe"] = "another"
    (base / "config.json").write_text(json.dumps(config))
    assert {h.info.path for h in made(entry, drafters=[str(base)])}.isdisjoint({first.info.path, second.info.path})


def test_a_sweep_of_made_heads_goes_on_though_somebody_has_deleted_them(home: Path) -> None:
    found = prepared({"kind": "slimspec", "rank": [16, 32]})
    found.make_heads()
    folder = SweepFolder.create(home, found, "sweep")
    assert set(folder.manifest()["drafters"]) == {"full", "slimspec-rank16", "slimspec-rank32"}
    assert "unknown" not in folder.manifest()["drafters"].values()
    shutil.rmtree(home / "heads")
    later = prepare(folder.config())
    later.make_heads()
    folder.check(later)  # the same weights again


def answered(home: Path) -> None:
    """Answers of the target where rayspec train leaves them."""
    target = FrozenTarget.load(TARGET, torch.float32)
    config = AnswersConfig(count=8, answer_tokens=24, greedy_share=1.0, batch_size=8)
    prompts = [target.tokenizer(text)["input_ids"][:24] for text in prompt_texts(8)]
    answer_in_process(home / "training" / TARGET.name / "answers", target, config, prompts)


def test_with_the_targets_own_answers_factors_are_weighted_by_what_the_base_meets_on_them(home: Path) -> None:
    entry = {"kind": "slimspec", "rank": 16}
    (plain,) = made(entry)
    answered(home)
    assert f"weighted by what it meets on {home}/training/target/answers" in prepared(entry).describe()
    (weighted,) = made(entry)
    assert weighted.info.path != plain.info.path
    base = load_drafter(FULL)[0]
    answers = read_answers(home / "training" / "target" / "answers")
    target = FrozenTarget.load(TARGET)
    moment_HH = head_moments(target, answers, base, 4)["hidden_moment"]
    want = base.lm_head.at(0).get_parameter("weight").detach()

    def error(head: MadeHead) -> float:
        matrix, _ = load_drafter(head.info.path)[0].lm_head.at(0).as_matrix() or pytest.fail("it has one")
        rest = matrix - want
        return float((rest @ moment_HH * rest).sum())  # over the states that are met, of all logits

    assert error(weighted) < 0.8 * error(plain)
    spec = {"kind": "rdk", "base": {"kind": "truncated", "size": 64}, "affinity": "counted", "artifacts": VOCABTRIM}
    (counted,) = made(spec)
    assert load_drafter(counted.info.path)[1].head.spec()["affinity"] == "counted"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), BrokenProcessPool("killed")])
def test_where_the_gpu_cannot_weigh_heads_the_cpu_does(
    error: Exception, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pool:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, *_: object) -> Future[object]:
            failed: Future[object] = Future()
            failed.set_exception(error)
            return failed

    answered(home)
    (first,) = made({"kind": "slimspec", "rank": 16})
    weights = (Path(first.info.path) / "model.safetensors").read_bytes()
    shutil.rmtree(first.info.path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("rayspec.sweep.plan.made_heads.ProcessPoolExecutor", Pool)
    made({"kind": "slimspec", "rank": 16})
    assert f"on the CPU, since the GPU cannot run the target now: {error}" in capsys.readouterr().out
    assert (Path(first.info.path) / "model.safetensors").read_bytes() == weights


@pytest.mark.slow  # imports PyTorch and the target's library in another process
def test_what_another_process_measures_is_the_same(home: Path) -> None:
    answered(home)
    asked = FULL, home / "training" / "target" / "answers", str(TARGET), torch.device("cpu")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        found = process.submit(measured_moments, *asked).result()
    want = measured_moments(*asked)
    assert found.keys() == want.keys()
    assert all(torch.allclose(found[name], want[name]) for name in want)


def test_answers_of_another_target_weigh_nothing(home: Path) -> None:
    answered(home)
    index = home / "training" / "target" / "answers" / "answers.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "target_sha256": "0" * 64}))
    assert "weighted" not in prepared({"kind": "slimspec", "rank": 16}).describe()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "slimspek"}, r"heads\[0\].kind must be one of full, slimspec, .*, got 'slimspek'"),
    "no_kind": ({"rank": 3}, r"heads\[0\].kind must be one of full, .*, got None"),
    "option": (
        {"kind": "slimspec", "rnak": 32},
        r"^unknown key 'heads\[0\].rnak'; known under heads\[0\]: weight_format, group_size, rank, drafter, artifacts$",
    ),
    "missing": ({"kind": "slimspec"}, r"^heads\[0\].rank has no value; it needs one$"),
    "empty": ({"kind": "slimspec", "rank": []}, r"^heads\[0\].rank is an empty list; give it at least one value"),
    "twice": ({"kind": "slimspec", "rank": [32, 16, 32]}, r"^heads\[0\].rank must be without repetition, got 32 twice"),
    "zero": ({"kind": "slimspec", "rank": [32, 0]}, r"^heads\[0\].rank must be at least 1, got 0"),
    "base_zero": (
        {"kind": "rdk", "base": {"kind": "truncated", "size": 0}, "artifacts": VOCABTRIM},
        r"^heads\[0\].base.size must be at least 1, got 0",
    ),
    "mapping": (
        {"kind": "slimspec", "rank": {"kind": "slimspec", "rank": 3}},
        r"^heads\[0\].rank must be a whole number, got \{'kind'",
    ),
    "drafter_mapping": ({"kind": "slimspec", "rank": 3, "drafter": {"a": 1}}, r"^heads\[0\].drafter must be text, got"),
    "step": (
        {"kind": "truncated", "size": 9, "step_sizes": [[9, 0]]},
        r"^heads\[0\].step_sizes\[1\] must be at least 1, got 0",
    ),
    "type": ({"kind": "slimspec", "rank": [32, "x"]}, r"^heads\[0\].rank must be a whole number, got 'x'"),
    "size": ({"kind": "slimspec", "rank": 129}, r"^heads\[0\].rank must be in 1..128 \(the smaller .*\), got 129"),
    "list": ({"kind": "truncated", "size": 64, "step_sizes": []}, r"^heads\[0\].step_sizes is an empty list"),
    "format": (
        {"kind": "full", "weight_format": ["int8", "int3"]},
        r"heads\[0\].weight_format must be one of int8, fp8",
    ),
    "drafter": ({"kind": "slimspec", "rank": 8, "drafter": "nobody"}, r"^heads\[0\]: no drafter 'nobody': neither one"),
    "drafter_type": ({"kind": "slimspec", "rank": 8, "drafter": 3}, r"^heads\[0\].drafter must be text, got 3"),
    "reduced": (
        {"kind": "slimspec", "rank": 8, "drafter": str(DRAFTERS["truncated"])},
        r"^heads\[0\].drafter is .*/truncated, whose head is .*; a base needs a full head",
    ),
    "no_calibration": (
        {"kind": "truncated", "size": 64},
        r"^a truncated head of size 64 needs as many ids, got 0; .* name its output as heads\[0\]'s artifacts",
    ),
    "unknown_calibration": (
        {"kind": "truncated", "size": 64, "artifacts": "nothing"},
        r"^heads\[0\]: no calibration 'nothing': .*rayspec calibrate makes one",
    ),
    "too_short": (
        {"kind": "truncated", "size": 3000, "artifacts": VOCABTRIM},
        r"^a truncated head of size 3000 needs as many ids, got 2048",
    ),
    "not_its_calibration": (
        {"kind": "truncated", "size": 64, "artifacts": CLUSTERS},
        "a truncated head of size 64 needs as many ids, got 0",
    ),
    "nobodys_size": (
        {"kind": "truncated", "artifacts": CLUSTERS},
        r"^heads\[0\].size is absent, .* but those named hold cluster_of, counts and no ids; write a size",
    ),
    "needless_calibration": (
        {"kind": "slimspec", "rank": 8, "artifacts": VOCABTRIM},
        r"^heads\[0\].artifacts is .*, but this slimspec head is made of none; leave it out",
    ),
    "training": (
        {"kind": "dynaspec", "clusters": 128, "first": 32, "later": 24, "router_width": 64, "artifacts": CLUSTERS},
        r"^heads\[0\] asks for a new head of kind 'dynaspec', which begins at random and must be trained first: add "
        r"it .*run rayspec train, and name that drafter in heads\[0\].drafter; first, group_size, .*without training",
    ),
    "states": (
        {"kind": "rdk", "base": {"kind": "truncated", "size": 64}, "affinity": "counted", "artifacts": VOCABTRIM},
        r"^heads\[0\].affinity counted is counted along .* the target's answers; give it both, or use affinity cosine",
    ),
    "name": ({"kind": "full"}, r"^heads\[0\] makes 'full', but drafters: .*/full has that name already"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_made_is_refused_by_its_setting(case: str) -> None:
    entry, said = BAD[case]
    with pytest.raises(ValueError, match=said):
        prepared(entry)


def test_two_entries_of_one_head_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^heads\[1\] makes 'slimspec-rank16', but heads\[0\] has that name already"):
        prepared({"kind": "slimspec", "rank": [8, 16]}, {"kind": "slimspec", "rank": 16})


def test_a_head_that_does_not_fit_the_shape_fails_alone() -> None:
    found = prepared(
        {"kind": "truncated", "size": [4, 512], "artifacts": VOCABTRIM}, topk=8, num_draft_tokens=9, draft_steps=[2]
    )
    problems = {c.head.numbers.get("size"): c.problem for c in found.plan.candidates}
    assert problems[512] is None
    assert "may score as few as 4 tokens, but topk is 8" in str(problems[4])


def test_a_head_of_groups_in_a_head_is_planned_with_a_tree() -> None:
    """How many tokens a group has, its tensors alone say."""
    grouped = {"kind": "coral", "clusters": 8, "top": 2}
    entry = {"kind": "rdk", "base": grouped, "artifacts": GROUPS}
    found = prepared(entry, topk=2, num_draft_tokens=5, draft_steps=[2])
    assert [c.problem for c in found.plan.candidates] == [None, None]


def test_the_command_plans_and_refuses(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    settings = [f"target={TARGET}", f"drafters=[{FULL}]", f"workload={PROMPTS}:4", "draft_steps=[2]"]
    assert main(["--plan", *settings, "heads=[{kind: slimspec, rank: [16, 32]}]"]) == 0
    assert "slimspec-rank32-s2-c1" in capsys.readouterr().out
    assert main(["--plan", *settings, "heads=[{kind: slimspec, rank: []}]"]) == 2
    assert "heads[0].rank is an empty list" in capsys.readouterr().err
    assert main(["--plan", *settings, "heads=[slimspec]"]) == 2
    assert "heads[0] must be a mapping" in capsys.readouterr().err
    assert not home.exists()
