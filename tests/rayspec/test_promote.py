"""What a promotion checks before it writes, and that it leaves earlier versions as they are."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from fixture_models import DRAFTERS, TARGET
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from published import copy_store, download_champion, promoted, publish, undrawn
from safetensors.torch import load_file, save_file
from synthetic import SyntheticSweep, few_trials
from versions import answers

from rayspec.commands.report import _default_folder, main
from rayspec.report.promote import check_promotion, winner
from rayspec.serving.canary import measured_tau
from rayspec.serving.champion import ARTIFACT, find_champion
from rayspec.serving.record import RECORD, read_record
from rayspec.sweep.config import EngineConfig
from rayspec.sweep.record.folder import TARGET_SHA256, WHOLE_SHA256
from rayspec.sweep.record.stored import StoredSweep, find_sweep
from rayspec.tracking import Tracker
from sglang_ext.fingerprints import weights_sha256

MODEL = "drafter-target"


@dataclass(frozen=True, kw_only=True)
class Store:
    """Holds a sweep whose winner is `drafter`, a folder that shares its body with the folder `body` beside it."""

    sweep: StoredSweep
    drafter: Path
    body: Path
    report: Path

    @property
    def client(self) -> MlflowClient:
        return self.sweep.client

    @property
    def run_id(self) -> str:
        return self.sweep.run_ids[winner(self.sweep.results).trial]

    def check(self) -> None:
        check_promotion(self.sweep, winner(self.sweep.results), MODEL)

    def promote(self) -> str:
        """The source of the new version."""
        done = promoted(self.sweep, self.report, MODEL)
        return f"models:/{MODEL}/{done.version}"

    def artifacts(self) -> set[str]:
        return {f.path for id_ in (self.run_id, self.sweep.run_id) for f in self.client.list_artifacts(id_)}


@pytest.fixture(scope="session")
def published_with(
    tmp_path_factory: pytest.TempPathFactory, synthetic_sweep: SyntheticSweep
) -> Callable[[bool], tuple[Path, str]]:
    """A folder of a sweep, its store and its drafters, and the sweep's run id; made once, and once for
    an engine with hooks."""

    @cache
    def make(has_hooks: bool) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("published")
        drafter = folder / "drafters" / "truncated"
        shutil.copytree(DRAFTERS["truncated"], drafter)
        shutil.copytree(DRAFTERS["full"], folder / "drafters" / "full")
        engine = EngineConfig(extra={"forward_hooks": []} if has_hooks else {})
        few = few_trials(synthetic_sweep, target=str(TARGET), engine=engine)
        label = winner(few.results).trial.label
        moved = {
            trial: dataclasses.replace(trial, candidate=dataclasses.replace(trial.candidate, path=str(drafter)))
            if trial.candidate and trial.label == label
            else trial
            for trial in few.blocks
        }
        few = SyntheticSweep(
            config=few.config,
            blocks={moved[trial]: blocks for trial, blocks in few.blocks.items()},
            results=[dataclasses.replace(r, trial=moved[r.trial]) for r in few.results],
        )
        tracker = Tracker(f"sqlite:///{folder}/mlflow.db", "tests", (folder / "artifacts").as_uri())
        return folder, publish(tracker, few)

    return make


@pytest.fixture
def make_store(
    tmp_path: Path, published_with: Callable[[bool], tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Store]:
    def make(has_hooks: bool = False) -> Store:
        folder, run_id = published_with(has_hooks)
        copy_store(folder, tmp_path)
        uri = f"sqlite:///{tmp_path}/mlflow.db"
        monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        sweep, drafters = find_sweep(MlflowClient(uri), run_id), tmp_path / "drafters"
        return Store(sweep=sweep, drafter=drafters / "truncated", body=drafters / "full", report=tmp_path / "report")

    return make


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store()


def edit_config(drafter: Path, change: Callable[[dict[str, object]], object]) -> None:
    config = json.loads((drafter / "config.json").read_text())
    change(config)
    (drafter / "config.json").write_text(json.dumps(config))


def another_body(store: Store) -> None:
    """The body is trained again, and what shares it is attached to the new one: its own weights stay what they are."""
    weights = store.body / "model.safetensors"
    tensors = load_file(weights)
    tensors["fc.weight"] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    edit_config(store.drafter, lambda c: c["rayspec"]["shares"][0].update(sha256=weights_sha256(weights)))  # type: ignore[index]


CHANGED: dict[str, Callable[[Store], object]] = {
    "another body": another_body,
    "config.json alone": lambda s: edit_config(s.drafter, lambda c: c.update(rms_norm_eps=0.5)),
}


def test_a_version_says_what_it_answered_to_the_canary_prompts(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.promote()
    assert "was not asked" not in caplog.text
    found = measured_tau(answers(1.4), read_record(download_champion(store.client, MODEL, tmp_path / "copy")))
    assert found is not None
    assert (found.prompts, round(found.now, 2), round(found.measured, 2)) == (16, 2.39, 2.49)


def test_where_nobody_asked_a_version_says_nothing_of_them(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (kept,) = tmp_path.rglob(f"{store.run_id}/artifacts/canary.json")
    kept.unlink()
    store.promote()
    assert read_record(download_champion(store.client, MODEL, tmp_path / "copy")).canary == ()
    assert "was not asked the canary prompts" in caplog.text


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_drafter_has_no_evidence_though_its_own_weights_are_the_measured_ones(
    name: str, store: Store
) -> None:
    store.check()
    CHANGED[name](store)
    before = store.artifacts()
    with pytest.raises(ValueError, match=r"is not the one that trial .* measured \(its config\.json, or the weights"):
        store.promote()
    assert store.artifacts() == before


def test_where_a_drafter_comes_from_changes_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """One that is made again by another commit is the same."""
    edit_config(store.drafter, lambda c: c["rayspec"].update(commit="another"))  # type: ignore[attr-defined]
    store.check()
    assert not caplog.messages


def test_of_an_earlier_sweep_the_own_weights_are_checked_with_a_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.client.delete_tag(store.run_id, WHOLE_SHA256)
    another_body(store)
    store.check()
    assert "noted the fingerprint of its drafter's own weights alone" in caplog.text


def test_an_earlier_version_stays_what_it_was(store: Store) -> None:
    """Though the same trial is promoted again when one of the drafter's files is another, and one is gone."""
    (store.drafter / "training.png").write_bytes(b"a curve")
    (store.drafter / "notes.md").write_text("first")
    first = store.promote()
    (store.drafter / "training.png").unlink()
    (store.drafter / "notes.md").write_text("second")
    second = store.promote()
    old, new, by_run = (find_champion(source, store.client) for source in (first, second, store.run_id))
    assert (old.folder / "notes.md").read_text() == "first"
    assert (old.folder / "training.png").is_file()
    assert (new.folder / "notes.md").read_text() == "second"
    assert not (new.folder / "training.png").exists()
    assert by_run == new


def test_a_promotion_that_is_cut_off_leaves_the_version_that_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.promote()
    (store.drafter / "training.png").write_bytes(b"a curve")

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rayspec.report.promote._register", cut_off)
        with pytest.raises(KeyboardInterrupt):
            store.promote()
    for source in (first, store.run_id):
        assert not (find_champion(source, store.client).folder / "training.png").exists()


def test_a_promoted_run_is_fetched_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.promote()
    found = find_champion(store.run_id, store.client)
    monkeypatch.setattr("rayspec.serving.champion._artifacts", None)
    assert find_champion(store.run_id, store.client) == found


def test_a_run_of_an_earlier_release_is_found_whose_version_is_deleted(store: Store) -> None:
    source = store.promote()
    promoted_at = find_champion(source, store.client).folder
    (run,) = store.client.search_model_versions(f"run_id = '{store.run_id}'")
    store.client.delete_model_version(MODEL, run.version)
    with pytest.raises(ValueError, match="no version is registered that was promoted from run"):
        find_champion(store.run_id, store.client)
    store.client.log_artifacts(store.run_id, str(promoted_at), ARTIFACT)
    for _ in range(2):  # the second fetch replaces the first
        found = find_champion(store.run_id, store.client)
        assert found.name == f"run {store.run_id}"
        assert (found.folder / RECORD).read_bytes() == (promoted_at / RECORD).read_bytes()


def with_extra(store: Store) -> None:
    (store.drafter / "README.md").write_text("kept")


def in_stock_form(store: Store) -> None:
    """As SGLang has them: nothing in the folder says that it is ours."""
    from sglang_ext.drafters.checkpoint import load_drafter, save_drafter

    drafter, info = load_drafter(store.drafter)
    assert info.target is not None
    shutil.rmtree(store.drafter)
    save_drafter(store.drafter, drafter, info.target, stock=True)
    edit_config(store.drafter, lambda c: c.pop("rayspec", None))
    with pytest.MonkeyPatch.context() as patch:  # measured in this form
        patch.setattr("rayspec.report.promote._check_measured", lambda *_: None)
        store.promote()


@pytest.mark.parametrize("change", [with_extra, in_stock_form])
def test_a_damaged_copy_is_fetched_again_whatever_it_holds(change: Callable[[Store], None], store: Store) -> None:
    change(store)
    if change is with_extra:
        store.promote()
    folder = find_champion(f"models:/{MODEL}@champion", store.client).folder
    (folder / "config.json").write_text("{}")
    (folder / "more").mkdir()
    for source in (f"models:/{MODEL}@champion", store.run_id):
        assert find_champion(source, store.client).folder == folder
    assert not (folder / "more").exists()


def test_nothing_is_fetched_through_a_link(store: Store, tmp_path: Path) -> None:
    source = store.promote()
    folder = find_champion(source, store.client).folder
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link or a file, and a champion that was fetched is a folder there"):
        find_champion(source, store.client)
    assert (tmp_path / "elsewhere" / "config.json").read_text() == "{}"


def test_a_version_whose_name_is_a_path_is_fetched_nowhere(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries are somebody else's."""
    source = store.promote()
    version = store.client.get_model_version(MODEL, "1")
    monkeypatch.setattr(version, "_name", "../../outside")
    monkeypatch.setattr(store.client, "get_model_version", lambda *_: version)
    monkeypatch.setattr(store.client, "get_model_version_download_uri", lambda *_: version.source)
    with pytest.raises(ValueError, match="the name of what is fetched must be a plain folder name"):
        find_champion(source, store.client)


UNFIT: dict[str, tuple[Callable[[Store], object], list[str], str]] = {
    "a drafter that is gone": (lambda s: shutil.rmtree(s.drafter), [], "is not the one that trial"),
    "another drafter": (another_body, [], "is not the one that trial"),
    "a target without a fingerprint": (
        lambda s: s.client.delete_tag(s.sweep.run_id, TARGET_SHA256),
        [],
        "did not note the fingerprint of its target",
    ),
    "a link": (lambda s: (s.drafter / "notes").symlink_to("/etc"), [], "notes in it are symbolic links"),
    "a pipe": (lambda s: os.mkfifo(s.drafter / "pipe"), [], "pipe in it are symbolic links, or else no plain files"),
    "a name that MLflow refuses": (lambda _: None, ["--model", "a/b"], "--model must be a name without / and :"),
    "an alias that MLflow keeps": (lambda _: None, ["--alias", "V1"], "--alias must be at most 255 letters, digits, _"),
    "an engine with hooks": (lambda _: None, [], "flags must be without forward_hooks"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_plan_refuses_what_the_promotion_would(
    name: str, make_store: Callable[..., Store], capsys: pytest.CaptureFixture[str]
) -> None:
    change, arguments, message = UNFIT[name]
    store = make_store(name == "an engine with hooks")
    change(store)
    before = store.artifacts()
    command = ["--promote", "--out", str(store.report), *arguments]
    with undrawn():
        for more in (["--plan"], []):
            assert main([*command, *more]) == 2
            assert message in capsys.readouterr().err
    assert store.artifacts() == before
    assert not store.client.search_registered_models()


def test_a_plan_that_promises_is_kept(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--promote", "--out", str(store.report)]
    with undrawn():
        assert main([*command, "--plan"]) == 0
        assert "to register as champion of " in capsys.readouterr().out
        assert main(command) == 0
    assert "@champion is now version 1: " in capsys.readouterr().out


def test_that_none_has_earned_it_comes_before_that_there_is_nothing_to_emit(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build tells the one, a verdict, from what cannot be done."""
    for module in ("promote", "ready_files"):
        monkeypatch.setattr(f"rayspec.report.{module}.choices", lambda results: [])
    command = ["--out", str(store.report), "--emit", str(tmp_path / "ready")]
    with undrawn():
        for plan in (["--plan"], []):
            assert main([*command, "--promote", *plan]) == 1
            assert "refused: " in capsys.readouterr().err
            assert main([*command, *plan]) == 2
            assert "nothing to emit" in capsys.readouterr().err
    assert not (tmp_path / "ready").exists()


def test_another_alias_or_none_leaves_the_champion_where_it_is(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["--promote", "--out", str(store.report), "--emit", str(tmp_path / "ready")]
    said = {
        (): "models:/drafter-target@champion is now version 1: ",
        ("--alias", "candidate"): "models:/drafter-target@candidate is now version 2: ",
        ("--alias", "candidate", "--once"): "models:/drafter-target@candidate is still version 2: ",
        ("--no-alias",): "models:/drafter-target/3 is registered, and no alias means it: ",
    }
    with undrawn():
        for more, message in said.items():
            assert main([*command, "--model", MODEL, *more]) == 0
            assert message in capsys.readouterr().out
            number = next(n for n in "123" if f"version {n}:" in message or f"/{n} is" in message)
            for file in (tmp_path / "ready").rglob("rayservice.yaml"):
                assert f'source: "models:/drafter-target/{number}"\n' in file.read_text()
        assert any((tmp_path / "ready").rglob("rayservice.yaml"))
        assert main([*command, "--model", MODEL, "--no-alias", "--plan"]) == 0
        assert f"to register as a version of {MODEL} that no alias means: " in capsys.readouterr().out
    aliases = store.client.get_registered_model(MODEL).aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {"champion": "1", "candidate": "2"}
    served = ["models:/drafter-target@champion", "models:/drafter-target@candidate", store.run_id]
    for version, source in zip(("1", "2", "3"), served, strict=True):
        assert f"rayspec serve {source}\n" in store.client.get_model_version(MODEL, version).description
        assert find_champion(source, store.client).name == f"{MODEL} version {version}"


def test_aliases_are_refused_that_mlflow_refuses(store: Store) -> None:
    best, version = winner(store.sweep.results), store.promote().rpartition("/")[2]
    for alias in ("next", "A_b-1", "v", "v1a", "latest1", "é", 255 * "a"):
        store.client.set_registered_model_alias(MODEL, alias, version)
        check_promotion(store.sweep, best, MODEL, alias)
    for alias in ("", "v1", "V12", "Latest", "a b", "a/b", "a@b", 256 * "a"):
        with pytest.raises(MlflowException):
            store.client.set_registered_model_alias(MODEL, alias, version)
        with pytest.raises(ValueError, match="--alias must be"):
            check_promotion(store.sweep, best, MODEL, alias)


FAULTS: dict[str, tuple[Exception, str]] = {
    "no right to write": (MlflowException("403: permission denied\nbody"), "error: MLflow at sqlite:///.*403"),
    "anything else": (RuntimeError("as a cloud's client raises"), "RuntimeError: as a cloud's .*\nerror: the report"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_never_told_as_nothing_to_promote(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, message = FAULTS[name]

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(MlflowClient, "log_artifacts", refuse)
    with undrawn():
        assert main(["--promote", "--out", str(store.report)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert ("Traceback" in said) == (name == "anything else")


def test_a_report_lies_in_the_home_folder_whatever_a_sweep_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path))
    for name, run_id in (("../../x", "0" * 32), ("sweep", "/../../x"), ("..", "0" * 32)):
        assert _default_folder(name, run_id).resolve().parent == tmp_path / "reports"
