"""The calibration job from the command line: real Ray Data on a small corpus, a real MLflow store."""

import gzip
import itertools
import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from answerers import answer_in_process
from mlflow import MlflowClient
from torch import Tensor

from rayspec.artifacts import BIGRAM, load_artifacts
from rayspec.calibration.config import CalibrationConfig
from rayspec.calibration.prepare import describe, prepare
from rayspec.calibration.rules.ranking import coverage, rank
from rayspec.calibration.runs import calibrate_all
from rayspec.calibration.sources.drafts import DraftSettings, proposals, texts
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.commands import calibrate
from rayspec.config import load_config, to_yaml
from rayspec.training.data.answers import AnswersConfig, read_answers
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.eagle3.config import Eagle3Options
from sglang_ext.drafters.eagle3.training import config_for
from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.trees.slim import SlimOptions, SlimTree

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "calibrate").glob("*.yaml"))


@pytest.fixture(scope="module")
def drafter(tiny_target: FrozenTarget) -> Eagle3Drafter:
    drafter = Eagle3Drafter(
        config_for(tiny_target, Eagle3Options()), head_from_target(parse_head({"kind": "full"}), tiny_target.head_VG)
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        # of the stored precision, so that reading it back changes nothing
        parameter.data.copy_((0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16())
    return drafter.requires_grad_(False)


@pytest.fixture(scope="module")
def place(
    tiny_target: FrozenTarget, drafter: Eagle3Drafter, text_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with what rayspec train leaves, texts, and a config of every source and rule."""
    folder = tmp_path_factory.mktemp("calibrate")
    for seed, name in enumerate(("answers", "held_out")):
        config = AnswersConfig(count=6, min_prompt_tokens=6, max_prompt_tokens=9, answer_tokens=20, batch_size=4)
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(1, 257, (6 + n % 4,), generator=generator).tolist() for n in range(6)]
        answer_in_process(folder / "work" / name, tiny_target, config, prompts)
    save_drafter(folder / "mine", drafter, tiny_target.info())
    texts = [{"text": file.read_text(), "origin": {"name": file.name}} for file in sorted(text_folder.iterdir())]
    with gzip.open(folder / "texts.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
    (folder / "config.yaml").write_text(
        f"""
target: {tiny_target.folder}
output_dir: {folder / "out"}
work_dir: {folder / "work"}
sources:
  raw: {{kind: raw, documents: "{text_folder}"}}
  lines: {{kind: raw, documents: "{folder / "texts.jsonl.gz"}"}}
  target: {{kind: target}}
  draft: {{kind: draft, drafter: "{folder / "mine"}", draft_steps: 2, batch_size: 2}}
  text: {{kind: draft_text, drafter: "{folder / "mine"}", tokens: 6, batch_size: 2}}
calibrations:
  - {{name: frspec, source: raw, rule: {{kind: frspec, top_k: 20}}}}
  - {{name: frspec-lines, source: lines, rule: {{kind: frspec, top_k: 20}}}}
  - {{name: trim, source: target, rule: {{kind: vocabtrim, top_p: 0.8}}}}
  - {{name: trim-draft, source: draft, rule: {{kind: vocabtrim, min_count: 2}}}}
  - {{name: trim-text, source: text, rule: {{kind: vocabtrim, min_count: 1}}}}
  - {{name: bcl, source: target, rule: {{kind: bcl, search: tpe, drafter: "{folder / "mine"}"}}}}
  - {{name: clusters, source: target, rule: {{kind: kmeans, clusters: 16, max_size: 1.5, pinned: 4}}}}
  - {{name: groups, source: raw, rule: {{kind: contiguous, clusters: 4}}}}
  - {{name: pairs, source: target, rule: {{kind: bigram}}}}
  - {{name: pairs-raw, source: lines, rule: {{kind: bigram}}}}
"""
    )
    return folder


def counted(ids: list[int], vocab_size: int) -> list[int]:
    counts = Counter(ids)
    return [counts[i] for i in range(vocab_size)]


@pytest.fixture(scope="module")
def done(place: Path) -> Path:
    """The output folder after the job's script has run once, in this process."""
    on_terminate = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        patch.setenv("RAYSPEC_HOME", str(place / "home"))
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")  # of Ray's workers
        patch.setattr(sys, "argv", ["jobs/calibrate.py", "--config", str(place / "config.yaml")])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "jobs" / "calibrate.py"), run_name="__main__")
    signal.signal(signal.SIGTERM, on_terminate)
    assert ended.value.code == 0
    return place / "out"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_loads_and_is_written_as_it_was_read(file: Path, tmp_path: Path) -> None:
    config = load_config(CalibrationConfig, file)
    assert config.calibrations
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(CalibrationConfig, tmp_path / "resolved.yaml") == config


def test_sources_of_one_s_own_take_the_place_of_the_default_one(tmp_path: Path) -> None:
    """Which is the whole corpus, a minute's reading."""
    rule = "calibrations: [{name: a, source: %s, rule: {kind: contiguous, clusters: 4}}]\n"
    (tmp_path / "own.yaml").write_text("sources: {answers: {kind: target}}\n" + rule % "answers")
    (tmp_path / "none.yaml").write_text(rule % "raw")
    found = [load_config(CalibrationConfig, tmp_path / f"{name}.yaml").sources for name in ("own", "none")]
    assert [list(sources) for sources in found] == [["answers"], ["raw"]]


def test_plan_names_everything_and_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(place / "other_home"))
    text = "\n".join(describe(prepare(load_config(CalibrationConfig, place / "config.yaml", ["output_dir=nowhere"]))))
    assert text.count("to make") == 10
    assert "source draft (sha256 " in text
    assert "held out: " in text
    assert not (place / "other_home").exists()


def test_pipeline_counts_what_a_plain_loop_counts(
    done: Path, place: Path, text_folder: Path, tiny_target: FrozenTarget, drafter: Eagle3Drafter
) -> None:
    V = len(tiny_target.head_VG)
    text_ids = [i for f in sorted(text_folder.iterdir()) for i in tiny_target.tokenizer.encode(f.read_text())]
    answers = read_answers(place / "work" / "answers")
    settings = DraftSettings(steps=2, temperature=0.0, seed=0)
    drafts = proposals(drafter, tiny_target, answers, settings, torch.Generator()).flatten().tolist()
    six = DraftSettings(steps=6, temperature=0.0, seed=0)
    written = texts(drafter, tiny_target, answers, six, torch.Generator(), tiny_target.eos_ids).tolist()
    for name, ids in (
        ("frspec", text_ids),
        ("frspec-lines", text_ids),
        ("trim", answers.token_ids_NL[answers.loss_mask_NL].tolist()),
        ("trim-draft", drafts),
        ("trim-text", written),
    ):
        tensors, provenance = load_artifacts(done / name, tiny_target.info(), tiny_target.eos_ids)
        assert tensors["counts"].tolist() == counted(ids, V), name
        assert provenance["figures"]["tokens_counted"] == len(ids)


def test_pairs_are_those_within_a_document(
    done: Path, place: Path, text_folder: Path, tiny_target: FrozenTarget
) -> None:
    answers = read_answers(place / "work" / "answers")
    of_answers: Counter[tuple[int, int]] = Counter()
    for ids, prompt, length in zip(answers.token_ids_NL, answers.prompt_length_N, answers.length_N, strict=True):
        of_answers.update(itertools.pairwise(ids[int(prompt) - 1 : int(length)].tolist()))
    of_texts: Counter[tuple[int, int]] = Counter()
    for file in text_folder.iterdir():
        of_texts.update(itertools.pairwise(tiny_target.tokenizer.encode(file.read_text())))
    for name, expected in (("pairs", of_answers), ("pairs-raw", of_texts)):
        tensors, provenance = load_artifacts(done / name, tiny_target.info(), tiny_target.eos_ids)
        indptr, found = tensors["bigram_indptr"], {}
        for x in range(len(tiny_target.head_VG)):
            row = slice(int(indptr[x]), int(indptr[x + 1]))
            ids, counts = tensors["bigram_ids"][row].tolist(), tensors["bigram_counts"][row].tolist()
            found.update({(x, y): count for y, count in zip(ids, counts, strict=True)})
        assert found == dict(expected), name
        assert provenance["figures"]["pairs"] == len(expected)
        SlimTree.with_counts(SlimOptions(pairs=len(expected)), *(tensors[key] for key in BIGRAM)).correlations()


def test_artifacts_are_what_the_rules_say_and_suit_the_heads(
    done: Path, place: Path, tiny_target: FrozenTarget
) -> None:
    V, stop_ids = len(tiny_target.head_VG), tiny_target.eos_ids
    held_out = read_answers(place / "work" / "held_out")
    held_out_V = torch.tensor(counted(held_out.token_ids_NL[held_out.loss_mask_NL].tolist(), V))
    loaded: dict[str, dict[str, Tensor]] = {}
    for folder in sorted(folder for folder in done.iterdir() if not folder.name.startswith("pairs")):
        tensors, provenance = load_artifacts(folder, tiny_target.info(), stop_ids)
        loaded[folder.name] = dict(tensors)
        assert provenance["target"]["name"] == tiny_target.info().name
        assert provenance["source"]["sha256"]
        assert provenance["versions"]["optuna"] != "unknown"
        if "ids" in tensors:
            words = Vocabulary.load(tiny_target.folder, "tiny")
            assert torch.equal(tensors["ids"], rank(tensors["counts"], words)[: len(tensors["ids"])])
            expected = float(coverage(held_out_V, tensors["ids"])[-1])
            assert provenance["figures"]["held_out_coverage"] == expected
            head = {"kind": "truncated", "size": len(tensors["ids"])}
        elif folder.name == "clusters":
            head = {"kind": "dynaspec", "clusters": 16, "first": 4, "later": 4, "router_width": 8}
        else:
            head = {"kind": "coral", "clusters": 4, "top": 2}
        head_from_target(parse_head(head), tiny_target.head_VG, tensors).check(stop_ids)
    assert len(loaded["frspec"]["ids"]) == 20
    assert torch.equal(loaded["frspec"]["ids"], loaded["frspec-lines"]["ids"])
    assert int(loaded["clusters"]["cluster_of"].bincount()[1:].max()) <= 1.5 * V / 16 + 1
    pictures = {folder.name: sorted(p.name for p in folder.glob("*.png")) for folder in done.iterdir()}
    assert pictures["bcl"] == ["coverage.png", "utility.png"]
    assert pictures["groups"] == ["cluster_sizes.png"]


def test_every_calibration_is_a_finished_run(done: Path, place: Path) -> None:
    client = MlflowClient(f"sqlite:///{place / 'home' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rayspec-calibrations")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {folder.name for folder in done.iterdir()}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    bcl = runs["bcl"]
    assert bcl.data.params["rule.kind"] == "bcl"
    assert bcl.data.params["rule.min_coverage"] == "0.9"
    assert bcl.data.params["source.kind"] == "target"
    assert bcl.data.metrics["coverage"] >= 0.9
    files = {file.path for file in client.list_artifacts(bcl.info.run_id)}
    assert files == {"calibration.json", "calibration.safetensors", "config.yaml", "figures"}


def test_what_is_made_stays_and_what_differs_is_refused(
    done: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(place / "home"))
    stamps = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    prepared = prepare(load_config(CalibrationConfig, place / "config.yaml"))
    assert "\n".join(describe(prepared)).count("already made") == 10
    assert set(calibrate_all(prepared, "test").values()) == {None}
    assert stamps == {path: path.stat().st_mtime_ns for path in done.rglob("*")}

    other = "calibrations=[{name: frspec, source: raw, rule: {kind: frspec, top_k: 21}}]"
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        assert calibrate.main(["--config", str(place / "config.yaml"), other]) == 2
    finally:
        signal.signal(signal.SIGTERM, on_terminate)
    assert "holds a calibration with rule" in capsys.readouterr().err
