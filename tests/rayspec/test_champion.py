"""Which champions may take traffic, and the policy that they bring."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub.constants
import mlflow.artifacts
import pytest
from fixture_models import TARGET
from mlflow import MlflowClient
from requests import HTTPError
from rollover_world import cut_short, tamper
from safetensors.torch import load_file, save_file

from rayspec.champion_fields import MEASURED, NOT_OF_A_RECORD
from rayspec.commands.report import _tell_of_the_policy
from rayspec.report.promote import winner
from rayspec.report.ready_files import emit
from rayspec.serving.access import Access
from rayspec.serving.alias import pinned_source
from rayspec.serving.canary_actor import outages_postpone
from rayspec.serving.champion import PINNED, Champion, find_champion
from rayspec.serving.launch import server_command
from rayspec.serving.policy import beside_plain, fewest_blocks, has_loads, measured_policy
from rayspec.serving.record import RECORD
from rayspec.serving.rollover import Postponed
from rayspec.serving.version import ServedVersion, _checked, served_version
from rayspec.statistics import MIN_BLOCKS
from rayspec.sweep.plan.trials import PLAIN
from rayspec.sweep.record.stored import StoredSweep, find_sweep
from rayspec.tracking import ArtifactsAway, TrackingError
from sglang_ext.adapter.server_fields import server_fields
from sglang_ext.fingerprints import combined_sha256
from sglang_ext.folder_kinds import POLICY
from sglang_ext.policy.table import read_table

MODEL = "models:/drafter-target@champion"


def test_a_champion_is_found_by_each_of_its_names(champion_client: MlflowClient, promoted: Path) -> None:
    by_alias = find_champion(MODEL, champion_client)
    assert by_alias.target == str(TARGET)
    assert by_alias.record.evidence["clearly_faster_than_plain"] == "yes"
    assert (by_alias.folder / "model.safetensors").is_file()
    for source in ("models:/drafter-target/1", (promoted / "run").read_text(), str(by_alias.folder)):
        assert find_champion(source, champion_client).record == by_alias.record
    for source in (MODEL, (promoted / "run").read_text()):
        assert pinned_source(source, champion_client) == "models:/drafter-target/1"


def edit_record(folder: Path, **values: object) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(record | values))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "tampered": (tamper, r"is not what was promoted: model\.safetensors was changed"),
    "cut short": (cut_short, r"is not what was promoted: model\.safetensors was cut short"),
    "added": (lambda f: (f / "more.py").write_text(""), r"is not what was promoted: more\.py was added"),
    "gone": (lambda f: (f / "config.json").unlink(), r"is not what was promoted: config\.json is gone"),
    "no record": (lambda f: (f / RECORD).unlink(), r"carries no evidence .*serving\.json is missing"),
    "half a record": (lambda f: (f / RECORD).write_text('{"head":'), r"serving\.json is damaged"),
    "another target": (lambda f: edit_record(f, target_sha256="0" * 64), "was measured on target .* are others"),
    "several nodes": (lambda f: edit_record(f, nodes=2), "was measured with engines over 2 nodes each"),
    "a link": (lambda f: (f / "more").symlink_to("/etc"), r"more, which are no plain files"),
    "a linked record": (
        lambda f: ((f / RECORD).rename(f.parent / RECORD), (f / RECORD).symlink_to(f.parent / RECORD)),
        r"serving\.json, which are no plain files",
    ),
    "a target of its own": (
        lambda f: edit_record(f, flags={"model_path": "/evil"}),
        "flags must be without model_path",
    ),
    "code of others": (lambda f: edit_record(f, flags={"trust_remote_code": True}), "flags must be without trust_re"),
    "code by name": (
        lambda f: edit_record(f, flags={"forward_hooks": '[{"hook_factory": "os:system"}]'}),
        "flags must be without forward_hooks: no setting of speed that a champion may bring",
    ),
    "no weights": (lambda f: edit_record(f, flags={"load_format": "dummy"}), "flags must be without load_format"),
    "logits by requests": (
        lambda f: edit_record(f, flags={"enable_custom_logit_processor": True}),
        "flags must be without enable_custom_logit_processor",
    ),
    "no shape": (lambda f: edit_record(f, flags={}), "does not say speculative_algorithm, speculative_num_steps"),
    "no flag": (lambda f: edit_record(f, flags={"--x": 1}), r"flags\.--x is no argument of SGLang"),
    "no threads": (lambda f: edit_record(f, num_threads=0), "num_threads must be at least 1, got 0"),
    "evidence that is no text": (lambda f: edit_record(f, evidence={"tau": 2}), r"evidence\.tau must be text, got 2"),
    "no tau": (
        lambda f: edit_record(f, evidence={"clearly_faster_than_plain": "yes", "tau": "fast"}),
        r"carries no evidence of what it accepts .*--force",
    ),
    "not faster": (
        lambda f: edit_record(f, evidence={"clearly_faster_than_plain": "no", "speedup_vs_plain": "0.93"}),
        r"was not clearly faster than plain decoding .*speed-up 0\.93.*--force",
    ),
}


def test_a_tag_that_is_no_fingerprint_names_no_folder(
    champion_client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = champion_client.get_model_version_by_alias("drafter-target", "champion")
    version.tags[PINNED] = "/../../../elsewhere"
    monkeypatch.setattr(champion_client, "get_model_version_by_alias", lambda *_: version)
    with pytest.raises(ValueError, match=r"its tag serving\.sha256 is no SHA-256"):
        find_champion(MODEL, champion_client)


def test_a_version_of_one_file_is_no_drafter(
    champion_client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("none")
    monkeypatch.setattr(champion_client, "get_model_version_download_uri", lambda *_: (tmp_path / "notes.txt").as_uri())
    with pytest.raises(ValueError, match="is no folder of a drafter; promote a champion again"):
        find_champion(MODEL, champion_client)


def test_what_a_champion_may_bring_is_of_sglang() -> None:
    """A name that is none would allow nothing, and hide that one has moved."""
    assert set(MEASURED) <= set(server_fields())
    assert not set(MEASURED) & NOT_OF_A_RECORD


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_takes_no_traffic(fault: str, champion_client: MlflowClient) -> None:
    damage, message = BAD[fault]
    folder = find_champion(MODEL, champion_client).folder
    damage(folder)
    with pytest.raises(ValueError, match=message):
        find_champion(str(folder), champion_client)


def test_a_target_of_the_hub_is_served_from_the_files_that_were_checked(
    champion_client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang, given the name, would ask the hub and take what has come there since."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--org--name", "a" * 40
    shutil.copytree(TARGET, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    folder = find_champion(MODEL, champion_client).folder
    edit_record(folder, target="org/name", target_sha256=combined_sha256({"org/name": commit}))
    found = find_champion(str(folder), champion_client)
    words = server_command(found, "127.0.0.1", 31000, follows_policy=False)
    assert words[words.index("--model-path") + 1] == str(repository / "snapshots" / commit)
    assert words[words.index("--served-model-name") + 1] == "org/name"
    (repository / "snapshots" / commit).rename(repository / "snapshots" / ("b" * 40))
    (repository / "refs" / "main").write_text("b" * 40)
    with pytest.raises(ValueError, match="the files of org/name are others"):
        find_champion(str(folder), champion_client)
    for weights in (repository / "snapshots" / ("b" * 40)).glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ValueError, match=r"org/name lies in .* without its weights as \*\.safetensors"):
        find_champion(str(folder), champion_client)
    shutil.rmtree(repository)
    with pytest.raises(ValueError, match=r"org/name is not in this machine.s Hugging Face cache.*download org/name"):
        find_champion(str(folder), champion_client)


def test_a_record_other_than_the_promoted_one_is_refused(champion_client: MlflowClient, promoted: Path) -> None:
    """Who can write the files can write their fingerprints, but not the tag of the version."""
    (file,) = promoted.rglob(RECORD)
    promoted = file.read_text()
    edit_record(file.parent, head="another")
    try:
        with pytest.raises(ValueError, match=r"is not the one that was promoted .*serving\.sha256"):
            find_champion(MODEL, champion_client)
    finally:
        file.write_text(promoted)


def test_a_damaged_copy_is_fetched_again(champion_client: MlflowClient) -> None:
    folder = find_champion(MODEL, champion_client).folder
    tamper(folder)
    assert find_champion(MODEL, champion_client).folder == folder


def replica_version(champion: Champion, source: str, **given: Any) -> ServedVersion:
    """What a replica is told while nobody listens at MLflow's address."""
    told = {"target": None, "force": False, "follows_policy": True, "more": (), "access": Access()} | given
    return served_version(champion, source, tracking_uri="http://127.0.0.1:9", **told)


def test_a_replica_starts_from_what_its_node_has_without_mlflow(champion_client: MlflowClient, tmp_path: Path) -> None:
    """As one that takes the place of another that died while MLflow is away, with all checks."""
    champion, source = find_champion(MODEL, champion_client), "models:/drafter-target/1"
    found = _checked(replica_version(champion, source))
    assert (found.folder, found.record) == (champion.folder, champion.record)
    other = tmp_path / "target"
    shutil.copytree(TARGET, other)
    (other / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"was measured on target .* are others"):
        _checked(replica_version(champion, source, target=str(other)))
    version = replica_version(champion, source)
    tamper(champion.folder)
    with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9 does not answer"):
        _checked(version)
    again = dataclasses.replace(version, tracking_uri=champion_client.tracking_uri)
    assert _checked(again).folder == champion.folder, "it is fetched again"
    assert _checked(version).folder == champion.folder


def test_numbers_that_are_none_are_refused(champion_client: MlflowClient, tmp_path: Path) -> None:
    from rayspec.serving.record import files_sha256

    folder = find_champion(MODEL, champion_client).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    edit_record(folder, files=files_sha256(folder))
    with pytest.raises(ValueError, match=r"fc\.weight holds NaN or Inf"):
        find_champion(str(folder), champion_client)


def test_what_is_not_there_is_named(champion_client: MlflowClient, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="has no models:/nobody@champion"):
        find_champion("models:/nobody@champion", champion_client)
    for source in ("nowhere", "", "http://user:correct-horse@host/x"):
        with pytest.raises(ValueError, match="neither a folder nor models:/NAME@ALIAS") as error:
            find_champion(source, champion_client)
        assert "correct-horse" not in str(error.value)
    champion_client.create_registered_model("stranger")
    champion_client.create_model_version("stranger", tmp_path.as_uri())
    with pytest.raises(ValueError, match=r"carries no evidence .*tag serving\.sha256 is missing"):
        find_champion("models:/stranger/1", champion_client)


def rate(requests: Sequence[Mapping[str, Any]]) -> float:
    """Tokens after the first, a second of a request."""
    return sum(r["output_tokens"] - 1 for r in requests) / sum(r["e2e_s"] - r["ttft_s"] for r in requests)


def test_a_machine_that_slows_down_changes_no_cost() -> None:
    def answer(block: int, seconds: float, verify_steps: int) -> dict[str, Any]:
        steps = {"verify_steps": verify_steps, "accepted_drafts": 20 - verify_steps}
        return {"block": block, "ttft_s": 0.1, "e2e_s": 0.1 + seconds, "output_tokens": 21, **steps}

    plain = [answer(0, 2.0, 0), answer(1, 4.0, 0)]  # while the second was measured, everything took twice as long
    for block, seconds in ((0, 1.5), (1, 3.0)):
        assert beside_plain([answer(block, seconds, 10)], 2, plain) == pytest.approx(225.0)
    assert beside_plain(plain, 0, plain) == pytest.approx(150.0)
    assert beside_plain([answer(7, 1.5, 10)], 2, plain) is None, "nothing was decoded plainly beside it"


def test_the_champions_policy_is_what_was_measured(champion_client: MlflowClient, tmp_path: Path) -> None:
    """Its expected rates against plain decoding, at the acceptance of the sweep, are those of the same blocks."""
    sweep = find_sweep(champion_client)
    plain = {r.trial.traffic: sweep.requests(r.trial) for r in sweep.results if r.trial.label == PLAIN}
    files = [file for file in emit(sweep, tmp_path / "ready") if file.name == POLICY]
    assert files
    for file in files:
        table = read_table(file)
        best = next(r for r in sweep.results if r.trial.name == file.parent.name)
        assert table.lengths == [0, 2, 4]
        assert table.about["drafter"] == best.trial.label
        for result in (r for r in sweep.results if r.trial.label == best.trial.label):
            trial = result.trial
            requests = sweep.requests(trial)
            beside = [r for r in plain[trial.traffic] if r["block"] in {r["block"] for r in requests}]
            streams = trial.traffic.concurrency
            expected = result.metrics["tau"] * table.step_ms(0, streams) / table.step_ms(trial.draft_steps, streams)
            assert expected == pytest.approx(rate(requests) / rate(beside), rel=1e-3)
            assert table.step_ms(0, streams) == pytest.approx(1e3 / rate(plain[trial.traffic]), rel=1e-3)
        longest = [r for r in sweep.results if r.trial.label == best.trial.label and r.trial.draft_steps == 4]
        shares = [r.metrics["accept_cond_1"] for r in longest]
        assert min(shares) - 1e-3 <= table.accepted_if_reached[0] <= max(shares) + 1e-3


def test_a_champion_is_served_with_its_policy(champion_client: MlflowClient) -> None:
    champion = find_champion(MODEL, champion_client)
    assert champion.policy is not None
    words = server_command(champion, "127.0.0.1", 31000)
    flags = {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}
    assert flags["--speculative-adaptive-config"] == str(champion.folder / POLICY)
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("4", "5")
    fixed = server_command(champion, "127.0.0.1", 31000, follows_policy=False)
    assert "--speculative-adaptive-config" not in fixed
    assert fixed[fixed.index("--speculative-num-steps") + 1] == champion.record.evidence["draft_steps"]


def test_a_damaged_policy_takes_no_traffic(champion_client: MlflowClient) -> None:
    folder = find_champion(MODEL, champion_client).folder
    (folder / POLICY).write_text("{}")
    with pytest.raises(ValueError, match=r"is not what was promoted: policy\.json was changed"):
        find_champion(str(folder), champion_client)


def test_one_load_gives_no_policy(champion_client: MlflowClient) -> None:
    sweep = find_sweep(champion_client)
    best = winner(sweep.results)
    alone = [r for r in sweep.results if r.trial.traffic == best.trial.traffic]
    assert measured_policy(dataclasses.replace(sweep, results=tuple(alone)), best) is None
    assert not has_loads(alone, best)
    assert has_loads(sweep.results, best)


def test_a_policy_of_few_blocks_is_told(champion_client: MlflowClient, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = find_sweep(champion_client)
    best = winner(sweep.results)
    blocks = {request["block"] for request in sweep.requests(best.trial)}
    assert fewest_blocks(sweep, best) == len(blocks)
    for number, is_told in ((MIN_BLOCKS - 1, True), (MIN_BLOCKS, False)):
        with mock.patch.object(StoredSweep, "requests", lambda *_, n=number: [{"block": i} for i in range(n)]):
            _tell_of_the_policy(sweep, best)
        assert (f"note: the policy's costs are of {number} prompt block(s)" in capsys.readouterr().out) is is_told


class NoCredentials(Exception):
    """As boto's: of no class that MLflow knows."""


@pytest.mark.parametrize("error", [NoCredentials("the key is hunter2"), HTTPError("503 of the proxy of artifacts")])
def test_a_store_of_artifacts_that_fails_says_nothing_of_the_version(
    error: Exception, champion_client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", fail)
    said = rf"cannot be fetched now \({type(error).__name__} of the store\)"
    with pytest.raises(ArtifactsAway, match=said) as caught:
        find_champion(MODEL, champion_client)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(Postponed, match="cannot be fetched now"), outages_postpone():
        find_champion(MODEL, champion_client)
