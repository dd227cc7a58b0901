"""Every table of the papers is a config that plans, and what a sweep names is made by the configs beside it."""

import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from answerers import InTurn, as_prompts
from planned_home import (
    BCL_SIZE,
    PAIRS,
    make_calibrations,
    make_drafter,
    make_shipped_drafter,
    make_target,
    planned_home,
)

from rayspec.calibration.config import CalibrationConfig
from rayspec.calibration.prepare import describe
from rayspec.calibration.prepare import prepare as prepare_calibration
from rayspec.config import load_config
from rayspec.shipped import ASSETS
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.head_entry import AskedHead
from rayspec.sweep.plan.prepare import Prepared, prepare
from rayspec.sweep.plan.sampling import check_drafts_are_said
from rayspec.sweep.shape import split_shape
from rayspec.training.data.answers import AnswersConfig, TargetName, make_answers
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.drafter_runs import plan
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from rayspec.training.trees import SlimTreeConfig
from sglang_ext.trees.slim import SlimTree

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "configs" / "papers"
SHIPPED = {folder.name for folder in (ASSETS / "drafters" / "smollm2-135m").iterdir()}
FILES = sorted(PAPERS.glob("*/*.yaml"))
TRAIN, CALIBRATE = ([f for f in FILES if f.stem.startswith(kind)] for kind in ("train", "calibrate"))
SWEEPS = [f for f in FILES if f not in TRAIN + CALIBRATE]

# by paper/table: (trials, cohorts, the most branches of a draft, baseline). A trial is a candidate, or plain decoding,
# at one load and temperature
EXPECTED: dict[str, tuple[int, int, int, str]] = {
    "dynaspec/figure1": (2 * 6, 1, 10, "eagle2"),
    "dynaspec/figure3": (4, 1, 10, "eagle2"),
    "dynaspec/table4": (4, 1, 10, "eagle2"),
    "dynaspec/tables_1_2": (7, 1, 10, "eagle2"),
    "slim/figure7": (12, 1, 10, "slim-heads-s-alone"),
    "slim/table5": (6, 4, 10, "medusa-heads"),
    "slim/table6": (8, 3, 10, "medusa-heads"),
    "slim/table6_second_head": (4, 1, 10, "slim-heads-ss-alone"),
    "slim/table7_four_heads": (2, 1, 10, "slim-heads-s"),
    "slim/table7_one_head": (2, 1, 10, "slim-heads-s"),
    "slim/table7_three_heads": (2, 1, 10, "slim-heads-s"),
    "slim/table7_two_heads": (2, 1, 10, "slim-heads-s"),
    "slim/tables_3_4_8": (11, 4, 10, "medusa-heads"),
    "slimspec/figure2": (6 * 3, 1, 1, "full-trained"),
    "slimspec/figure3": (2 * 10, 1, 1, "full-trained"),
    "slimspec/grid": (2 * 2 * 6, 1, 1, "full-trained"),
    "slimspec/rank_ablation": (6, 1, 1, "full-trained"),
    "slimspec/router_ranks": (8, 1, 1, "full-trained"),
    "specformer/table1": (4 * 3, 3, 1, "full-frozen"),
    "specformer/table2": (2 * 3, 1, 1, "specformer-l8-distilled"),
    "specformer/table3": (2, 1, 1, "specformer-l8"),
    "specformer/table4": (2 * 5, 4, 1, "specformer-l8"),
    "vocabtrim/domain": (6, 1, 8, "full"),
    "vocabtrim/figures_3_4": (9, 1, 8, "eagle2"),
    "vocabtrim/table4": (1 + 3 * 2, 3, 10, "eagle2"),
    "vocabtrim/tables_1_3_eagle": (6, 1, 8, "eagle2"),
    "vocabtrim/tables_1_3_independent": (6, 1, 8, "independent-h64"),
}


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


@cache
def read(schema: type[T], file: Path) -> T:
    return load_config(schema, file)


def trained(folder: Path) -> dict[str, DrafterEntry]:
    return {e.name: e for f in TRAIN if f.parent == folder for e in read(DrafterTrainConfig, f).drafters}


def calibrated(folder: Path) -> set[str]:
    return {c.name for f in CALIBRATE if f.parent == folder for c in read(CalibrationConfig, f).calibrations}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One in which all training and calibration has been done, so that a plan finds what it needs and nothing else."""
    with planned_home(tmp_path_factory.mktemp("home")) as folder:
        target = FrozenTarget.without_weights(make_target(folder))
        make_shipped_drafter(folder, target)
        for file in CALIBRATE:
            make_calibrations(folder, target, read(CalibrationConfig, file))
        for file in TRAIN:
            config = read(DrafterTrainConfig, file)
            for entry in config.drafters:
                if not (folder / "drafters" / "smollm2-135m" / entry.name).exists():
                    make_drafter(folder, target, entry, config)
        yield folder


def test_all_tables_are_planned_here() -> None:
    assert {name_of(f) for f in SWEEPS} == set(EXPECTED)


@pytest.mark.parametrize("file", SWEEPS, ids=name_of)
def test_a_table_is_planned(file: Path) -> None:
    config = read(SweepConfig, file)
    prepared: Prepared = prepare(config)
    check_drafts_are_said(config, prepared.plan.candidates)
    found = prepared.plan
    assert {c.label: c.problem for c in found.candidates if c.problem} == {}
    topk = max(c.shape.topk for c in found.candidates)
    assert (len(found.trials), len(found.cohorts), topk, config.baseline) == EXPECTED[name_of(file)]
    baseline = [c for c in found.candidates if c.drafter == config.baseline]
    assert baseline, "in the shape of the others, so that rho has something to be relative to"
    assert prepared.dropped == 0
    assert "warning" not in prepared.describe()


@pytest.mark.parametrize("file", SWEEPS, ids=name_of)
def test_what_a_sweep_names_is_made_beside_it_or_ships(file: Path) -> None:
    config = read(SweepConfig, file)
    drafters = {split_shape(d)[0] for d in config.drafters} | {h.drafter for h in _asked(config) if h.drafter}
    assert drafters - SHIPPED <= set(trained(file.parent))
    artifacts = {h.artifacts for h in _asked(config) if h.artifacts}
    assert artifacts <= calibrated(file.parent)


def _asked(config: SweepConfig) -> list[AskedHead]:
    return [head for entry in config.heads for head in entry.asked]


@pytest.mark.parametrize("folder", sorted({f.parent for f in FILES}), ids=lambda f: f.name)
def test_what_is_trained_is_made_of_what_is_there(folder: Path) -> None:
    """Bases before those that are made on them, in the order of the files' needs; artifacts and pairs of this paper."""
    made = trained(folder)
    for entry in made.values():
        assert entry.base is None or entry.base in made or entry.base in SHIPPED, entry.name
        asked = {entry.artifacts, getattr(entry.tree, "bigram", None)} - {None}
        assert asked <= calibrated(folder), entry.name
    for file in (f for f in TRAIN if f.parent == folder):
        names = [e.name for e in read(DrafterTrainConfig, file).drafters]
        for entry in read(DrafterTrainConfig, file).drafters:
            if entry.base in names:
                assert names.index(entry.base) < names.index(entry.name), f"{entry.name} comes before its base"
    for file in (f for f in CALIBRATE if f.parent == folder):
        config = read(CalibrationConfig, file)
        named = {s.drafter for s in config.sources.values() if hasattr(s, "drafter")}
        named |= {c.rule.drafter_name for c in config.calibrations} - {None}
        assert named - SHIPPED <= set(made), file.name


@pytest.mark.parametrize("file", TRAIN, ids=name_of)
def test_training_is_planned(file: Path, tmp_path: Path) -> None:
    elsewhere = [f"output_dir={tmp_path / 'drafters'}", f"work_dir={tmp_path / 'work'}"]
    config = load_config(DrafterTrainConfig, file, elsewhere)
    lines = plan(config)
    assert [line.split()[0] for line in lines if line.endswith("to train")] == [e.name for e in config.drafters]


@pytest.mark.parametrize("file", CALIBRATE, ids=name_of)
def test_calibration_is_planned(file: Path, home: Path, tmp_path: Path) -> None:
    target = TargetName("smollm2-135m", target_sha256(str(home / "models" / "smollm2-135m")))
    settings = AnswersConfig(count=2, min_prompt_tokens=8, max_prompt_tokens=8, answer_tokens=6, batch_size=2)
    answers = InTurn(lambda requests: [[5, 6, 7] for _ in requests])
    make_answers(tmp_path / "work" / "answers", target, settings, as_prompts([list(range(1, 9))] * 2), answers)
    elsewhere = [f"output_dir={tmp_path / 'calibrations'}", f"work_dir={tmp_path / 'work'}"]
    config = load_config(CalibrationConfig, file, elsewhere)
    lines = describe(prepare_calibration(config))
    assert [line.split()[0] for line in lines if line.endswith("to make")] == [c.name for c in config.calibrations]


def test_nothing_is_made_that_no_table_uses() -> None:
    for folder in {f.parent for f in FILES}:
        sweeps = [read(SweepConfig, f) for f in SWEEPS if f.parent == folder]
        made = trained(folder)
        used = {split_shape(d)[0] for s in sweeps for d in s.drafters} | {e.base for e in made.values()}
        controls = {"full-code", "eagle2-six"}  # what makes a domain's answers; measured by training alone
        assert set(made) - used <= controls, folder.name
        heads = {h.artifacts for s in sweeps for h in _asked(s) if h.artifacts}
        trees = {getattr(e.tree, "bigram", None) for e in made.values()}
        assert calibrated(folder) <= heads | trees | {e.artifacts for e in made.values()}, folder.name


def test_configs_that_share_a_home_agree() -> None:
    """A second answer set under one folder, or another drafter of a name, would be refused when the first is there."""
    configs = [read(DrafterTrainConfig, f) for f in [*(ROOT / "configs" / "train").glob("*.yaml"), *TRAIN]]
    assert len(configs) > len(TRAIN)
    answers: dict[str | None, set[str]] = {}
    for config in configs:
        answers.setdefault(config.work_dir, set()).add(repr((config.answers, config.held_out)))
    assert {len(own) for own in answers.values()} == {1}, "one folder has one set of answers"
    named: dict[str, str] = {}
    for config in configs:
        for entry in config.drafters:
            assert named.setdefault(entry.name, repr((entry, config.recipe))) == repr((entry, config.recipe)), (
                entry.name
            )
    rules: dict[str, str] = {}
    for file in [ROOT / "configs" / "calibrate" / "smollm2.yaml", *CALIBRATE]:
        calibrations = read(CalibrationConfig, file)
        for c in calibrations.calibrations:
            what = repr((c.rule, calibrations.sources[c.source], calibrations.work_dir))
            assert rules.setdefault(c.name, what) == what, c.name


@pytest.mark.parametrize("file", SWEEPS, ids=name_of)
def test_a_table_says_what_is_equal(file: Path) -> None:
    header = re.match(r"(#.*\n)+", file.read_text())
    assert header is not None
    assert "# Equal: " in header[0]


@pytest.mark.parametrize("file", [f for f in SWEEPS if f.parent.name == "slim"], ids=name_of)
def test_what_has_equal_hypotheses_has_nodes_for_all_of_them(file: Path) -> None:
    config, text = read(SweepConfig, file), file.read_text()
    if "hypotheses" not in text[text.index("# Equal: ") : text.index("name: ")]:
        return
    for entry in config.drafters:
        name, shape = config.shape_of(entry)
        tree = trained(file.parent)[name].tree
        if isinstance(tree, SlimTreeConfig):
            most = SlimTree(tree.options(PAIRS if tree.correlation else 0), vocab_size=10).most_nodes
            assert all(shape.verified(steps) == most(steps, shape.topk) for steps in config.draft_steps), entry


def test_one_token_asks_the_second_head(home: Path) -> None:
    """Of SLiM's table 6: the best token of the first draft, with and without r. By the formula none where no candidate
    was counted behind the root."""
    info = FrozenTarget.without_weights(home / "models" / "smollm2-135m").info("smollm2-135m", ())
    config = read(SweepConfig, PAPERS / "slim" / "table6_second_head.yaml")
    (steps,), candidates = config.draft_steps, config.topk
    # of all shapes: from one sure candidate to a draw from the whole vocabulary
    log_p_BDk = (torch.randn(64, steps, info.vocab_size) * torch.linspace(0, 9, 64)[:, None, None]).log_softmax(-1)
    best_BDk, ids_BDk = log_p_BDk.topk(candidates)
    nodes = {}
    for name in config.drafters:
        tree = trained(PAPERS / "slim")[name].tree
        assert isinstance(tree, SlimTreeConfig)
        assert tree.hypotheses == 1
        pruner = tree.given(info).fit(steps, candidates, config.num_draft_tokens, torch.device("cpu"))
        draft = pruner.of_candidates(torch.zeros(64, dtype=torch.int64), ids_BDk, best_BDk)
        nodes[tree.correlation, tree.unseen] = set(draft.num_nodes_B.tolist())
    assert nodes[True, "one"] == nodes[False, "one"] == {2}
    assert nodes[True, "zero"] <= {1, 2}


def test_every_table_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "papers.md").read_text()
    assert len(text.splitlines()) <= 100
    assert {name_of(f) for f in SWEEPS} == set(re.findall(r"`(\w+/\w+)\.yaml`", text)) - {
        name_of(f) for f in TRAIN + CALIBRATE
    }


def test_the_grid_is_whole() -> None:
    config = read(SweepConfig, PAPERS / "slimspec" / "grid.yaml")
    assert {t.label for t in config.traffic()} == {"c1-t0", "c16-t0", "c1-t1", "c16-t1"}
    assert {part.split(":")[0] for part in config.workload.split(", ")} == {"mt_bench", "humaneval", "gsm8k"}


def test_bcl_is_trained_with_as_many_tokens_as_its_rule_chose(tmp_path: Path) -> None:
    elsewhere = [f"output_dir={tmp_path / 'drafters'}", f"work_dir={tmp_path / 'work'}"]
    lines = plan(load_config(DrafterTrainConfig, PAPERS / "slimspec" / "train_truncated.yaml", elsewhere))
    assert f"bcl-trained {{'kind': 'truncated', 'size': {BCL_SIZE}}} -> " in "\n".join(lines)
    assert trained(PAPERS / "slimspec")["bcl-trained"].base is None, "a body of its own"
    candidates = prepare(read(SweepConfig, PAPERS / "slimspec" / "grid.yaml")).plan.candidates
    (bcl,) = (c for c in candidates if c.label == "bcl-trained")
    assert bcl.head.numbers == {"size": BCL_SIZE}


def test_lists_that_shrink_are_as_long_on_average() -> None:
    """Of DynaSpec's tables 3 and 4: what is compared must have equal mean size over the six draft steps."""
    made = trained(PAPERS / "dynaspec")
    sizes = made["frspec-positions"].draft_head.spec()["step_sizes"]
    assert len(sizes) == 6
    assert sum(sizes) / 6 == made["frspec-fixed"].draft_head.spec()["size"]
    first, later = (made["dynaspec-150-120"].draft_head.spec()[k] for k in ("first", "later"))
    budget = [first, later, *((later + t) // (2 * t) for t in range(2, 6))]
    assert abs(sum(budget) / 6 - made["dynaspec-fixed-58"].draft_head.spec()["first"]) < 0.5
