"""Wrong settings, prompts files and checkpoints: the job says what is wrong and how to go on, and nothing is begun.

Each case runs a job's own `main` with the arguments that a user would type. A message must name the setting or the
file, and what is allowed or what to do; a traceback is a failure of every case.
"""

import importlib
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from disks import small_disk
from fixture_models import CALIBRATIONS, DRAFTERS, TARGET, sweep_settings
from fixture_models import PROMPTS as HELD_OUT

RAW = "calibrations=[{name: a, source: raw, rule: {kind: frspec, top_k: 8}}]"
COUNTS = CALIBRATIONS / "vocabtrim-2048"
REAL = {"sweep": sweep_settings(4), "train": [f"target={TARGET}"], "calibrate": [f"target={TARGET}"], "export": []}
MEDUSA = "name: a, drafter: {kind: medusa}, draft_head: {kind: full}"
SETTINGS: dict[str, list[tuple[str, ...]]] = {  # arguments, then words of the message
    "sweep": [
        ("concurency=[1]", "unknown key 'concurency'", "concurrency"),
        ("engine.threads=2", "unknown key 'engine.threads'", "num_threads"),
        ("stop.width=0.1", "unknown key 'stop.width'", "ci_width"),
        ("concurrency", "expected key=value", "'concurrency'"),
        ("concurrency=[1", "no valid YAML"),
        ("concurrency=[zero]", "'zero'", "a whole number"),
        ("concurrency=[0]", "concurrency must be at least 1", "[0]"),
        ("concurrency=[2,2]", "concurrency must be without repetition"),
        ("concurrency=[]", "concurrency must be a list of at least one entry"),
        ("request_rate=[-1]", "request_rate must be positive"),
        ("request_rate=[.inf]", "request_rate[0] must be a finite number"),
        ("draft_steps=[]", "draft_steps must be a list of at least one entry"),
        ("draft_steps=[0]", "draft_steps must be at least 1"),
        ("draft_steps=two", "draft_steps"),
        ("drafters=[]", "drafters must be a list of at least one entry"),
        ("drafters=[full,a/full]", "drafters must be of different names"),
        ("baseline=slim", "baseline must be one of the drafters' names", "'slim'"),
        ("topk=0", "topk must be at least 1"),
        ("topk=2", "num_draft_tokens must be given for a tree"),
        ("topk=2", "num_draft_tokens=99", "num_draft_tokens must be in 2..", "99"),
        ("num_draft_tokens=3", "num_draft_tokens must be unset for a chain", "3"),
        ("block_prompts=0", "block_prompts must be at least 1"),
        ("repeats=0", "repeats must be at least 1"),
        ("repeats=many", "repeats", "many"),
        ("max_new_tokens=1", "max_new_tokens must be at least 2"),
        ("temperature=-1", "temperature must be at least 0"),
        ("warmup_tokens=0", "warmup_tokens must be at least 1"),
        ("stop.ci_width=0", "stop.ci_width must be positive"),
        ("stop.ci_width=0.1", "repeats=30", "stop.max_repeats must be at least repeats (30)"),
        ("stop.ci_width=0.1", f"workload={HELD_OUT}:4", "stop.ci_width needs a confidence interval"),
        ("stop.max_seconds=-3", "stop.max_seconds must be positive"),
        ("slo.ttft_ms=0", "slo.ttft_ms", "0"),
        ("engine.num_threads=0", "engine.num_threads must be at least 1"),
        ("engine.mem_fraction_static=2", "engine.mem_fraction_static must be between 0 and 1"),
        ("engine.start_timeout_s=0", "engine.start_timeout_s must be positive"),
        ("engine.extra.model_path=x", "engine.extra must be without model_path"),
        ("ray.num_gpus=-1", "ray.num_gpus must be at least 0"),
        ("target=/no/such/target", "/no/such/target"),
        ("workload=mtbench", "no workload 'mtbench'", "mt_bench"),
        (f"workload={HELD_OUT}:0", "the count after the colon must be at least 1"),
        (f"workload={HELD_OUT}:99999", "asks for 99999 prompts, but there are"),
        (f"workload={HELD_OUT}::poems", "no category 'poems'", "there are"),
        (f"workload={HELD_OUT}:2,{HELD_OUT}:2", "more than once"),
        ("--config=/no/such/sweep.yaml", "no config file at /no/such/sweep.yaml"),
    ],
    "train": [
        ("drafters=[]", "drafters is empty"),
        ("drafters=[{name: ../full, draft_head: {kind: full}}]", "drafters[].name must be a plain folder name"),
        ("drafters=[{name: .., draft_head: {kind: full}}]", "drafters[].name must be a plain folder name", "'..'"),
        ("drafters=[{name: ., draft_head: {kind: full}}]", "drafters[].name must be a plain folder name", "'.'"),
        (f"drafters=[{{name: {'a' * 201}, draft_head: {{kind: full}}}}]", "of at most 200 bytes"),
        ("drafters=[{name: a, draft_head: {kind: fulll}}]", "draft_head.kind must be one of full, slimspec", "'fulll'"),
        ("drafters=[{name: a, draft_head: {kind: slimspec}}]", "drafters[0].draft_head.rank has no value"),
        ("drafters=[{name: a, draft_head: {kind: slimspec, rank: 0}}]", "draft_head.rank must be at least 1"),
        ("drafters=[{name: a, draft_head: {kind: full, rank: 8}}]", "unknown key 'drafters[0].draft_head.rank'"),
        ("drafters=[{name: a, base: nothing, draft_head: {kind: full}}]", "base is 'nothing'", "train it first"),
        ("drafters=[{name: a, drafter: {kind: medusa, heads: 4}, draft_head: {kind: full}}]", "drafters[0]", "drafter.heads"),  # noqa: E501
        ("drafters=[{name: a, drafter: {kind: meduza}, draft_head: {kind: full}}]", "'meduza'", "medusa, hydra"),
        ("drafters=[{name: a, tree: {kind: static}, draft_head: {kind: full}}]", "use drafters[a].tree.kind slim"),
        (f"drafters=[{{{MEDUSA}, tree: {{kind: static, file: none.json}}}}]", "drafters[a]", "no tree in none.json"),
        (f"drafters=[{{{MEDUSA}, tree: {{kind: slim, bigram: {COUNTS}}}}}]", "holds counts", "rule bigram"),
        ("recipe.num_steps=0", "recipe.num_steps must be at least 1"),
        ("recipe.optimizer=sgd", "recipe.optimizer must be one of", "'sgd'"),
        ("recipe.warmup_steps=99999", "recipe.warmup_steps must be in 0.."),
        ("recipe.learning=1", "unknown key 'recipe.learning'"),
        ("target=nowhere", "nowhere"),
    ],
    "calibrate": [
        ("calibrations=[{name: .., source: raw, rule: {kind: frspec, top_k: 8}}]", "[].name must be a plain", "'..'"),
        ("calibrations=[{name: a, source: web, rule: {kind: frspec, top_k: 8}}]", "source must be one of sources"),
        ("calibrations=[{name: a, source: target, rule: {kind: frspec, top_k: 8}}]", "source must be of kind raw"),
        ("calibrations=[{name: a, source: raw, rule: {kind: frspek}}]", "frspek", "frspec"),
        ("calibrations=[{name: a, source: raw, rule: {kind: frspec, top_k: 0}}]", "top_k", "0"),
        ("calibrations=[{name: a, source: raw, rule: {kind: bigram, size: 3}}]", "unknown key", "rule.size"),
        ("sources.raw.documents=none", RAW, "documents", "none"),
        ("ray.blocks=0", "ray.blocks must be at least 1"),
    ],
    "export": [
        ("drafters=[nowhere]", "nowhere"),
        (f"drafters=[{DRAFTERS['dynaspec']}]", "dynaspec"),
        ("drafters=[..]", "the last part of each of drafters must be a plain folder name", "'..'"),
        ("output=x", "unknown key 'output'"),
    ],
}  # fmt: skip

PROMPTS = {
    "empty": ("", "holds no record"),
    "no_json": ("{'turns': ['a']}\n", ":1: no valid JSON"),
    "not_an_object": ("[1]\n", ":1: expected a JSON object, got list"),
    "no_prompt": ('{"promt": "a"}\n', ":1: no prompt in the record; expected one of turns"),
    "empty_turns": ('{"turns": []}\n', "turns must be a list of at least one text"),
    "turn_is_a_number": ('{"turns": ["a", 3]}\n', "must be text that is not empty, got 3"),
    "blank_prompt": ('{"prompt": " "}\n', "must be text that is not empty"),
    "repeated_id": ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', ":2: repeats the id '1' of line 1"),
    "unknown_role": ('{"messages": [{"role": "tool", "content": "a"}]}\n', "messages[0].role must be user"),
    "no_user": ('{"messages": [{"role": "system", "content": "a"}]}\n', "no message of role 'user'"),
    "id_is_a_list": ('{"id": [1], "prompt": "a"}\n', "the id must be text or a whole number"),
    "empty_category": ('{"category": "", "prompt": "a"}\n', "category must be text that is not empty"),
}

Break = Callable[[Path], object]


def edit_config(change: Callable[[dict], object]) -> Break:
    def break_(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return break_


NOWHERE = {"drafter": "nowhere", "sha256": "0", "tensors": []}
CHECKPOINTS: dict[str, tuple[Break, str]] = {
    "no_config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "no_weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    "config_is_no_json": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "truncated_weights": (lambda d: (d / "model.safetensors").write_bytes(b"\x08"), "model.safetensors"),
    "other_architecture": (edit_config(lambda c: c.update(architectures=["LlamaForCausalLM"])), "LlamaForCausalLM"),
    "unknown_kind": (edit_config(lambda c: c["draft_head"].update(kind="ful")), "ful"),
    "unknown_option": (edit_config(lambda c: c["draft_head"].update(size=3)), "'draft_head.size'"),
    "other_width": (edit_config(lambda c: c.update(hidden_size=64)), "hidden_size"),
    "newer_format": (edit_config(lambda c: c["rayspec"].update(format_version=99)), "format_version"),
    "missing_base": (
        edit_config(lambda c: c["rayspec"].update(shares=[NOWHERE])),
        "nowhere",
    ),
}


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    yield
    signal.signal(signal.SIGTERM, before)
    assert not list((tmp_path / "home").glob("**/*.db")), "something was begun"


def job(name: str) -> ModuleType:
    return importlib.import_module(f"rayspec.commands.{name}")


def refusal(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    """What a job that cannot run says on stderr."""
    try:
        code = job(name).main([*REAL[name], *arguments, "--plan"])
    except SystemExit as exit_:  # argparse
        code = exit_.code
    said = capsys.readouterr()
    assert code == 2, (code, said)
    assert "Traceback" not in said.err
    assert said.err.startswith("error: ")
    return said.err


CASES = [(name, case) for name, cases in SETTINGS.items() for case in cases]


@pytest.mark.parametrize(
    ("name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_wrong_settings(name: str, case: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    is_argument = [part.startswith("--") or "=" in part.split(" ")[0] or part == "concurrency" for part in case]
    arguments = [part for i, part in enumerate(case) if all(is_argument[: i + 1])]
    text = refusal(capsys, name, *arguments)
    for words in case[len(arguments) :]:
        assert words in text


@pytest.mark.parametrize("name", PROMPTS)
def test_wrong_prompts_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = PROMPTS[name]
    (tmp_path / "prompts.jsonl").write_text(content)
    text = refusal(capsys, "sweep", f"workload={tmp_path}/prompts.jsonl")
    assert "prompts.jsonl" in text
    assert words in text


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_broken_checkpoints(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_, words = CHECKPOINTS[name]
    shutil.copytree(DRAFTERS["full"], tmp_path / "drafter")
    break_(tmp_path / "drafter")
    text = refusal(capsys, "export", f"drafters=[{tmp_path}/drafter]", f"output_dir={tmp_path}/out")
    assert words in text
    assert str(tmp_path / "drafter") in text
    assert not (tmp_path / "out").exists()


DESTINATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "somebody's folder": (lambda d: (d.mkdir(), (d / "thesis.txt").write_text("mine")), "holds thesis.txt and is no"),
    "a model": (lambda d: (d.mkdir(), (d / "config.json").write_text("{}")), "holds config.json and is no"),
    "a file": (lambda d: d.write_text("mine"), "a file is there"),
    "a link": (lambda d: d.symlink_to("elsewhere"), "a link is there"),
}
TEXT_PROMPTS = "answers: {prompts: training}, held_out: {prompts: held_out}"
TRAIN = f"{{target: {TARGET}, {TEXT_PROMPTS}, drafters: [{{name: full, draft_head: {{kind: full}}}}]}}"
CALIBRATE = (
    f"target: {TARGET}"
    + """
sources: {raw: {kind: raw, documents: TEXTS}}
calibrations: [{name: full, source: raw, rule: {kind: frspec, top_k: 8}}]
"""
)
WRITERS = {
    "train": ("--config=TRAIN", "drafter"),
    "calibrate": ("--config=CONFIG", "calibration"),
    "export": (f"drafters=[{DRAFTERS['full']}]", "drafter"),
}


@pytest.fixture
def calibrate_yaml(tmp_path: Path, text_folder: Path) -> Path:
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "calibrate.yaml").write_text(CALIBRATE.replace("TEXTS", str(text_folder)))
    return tmp_path / "calibrate.yaml"


@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_not_ours_is_never_replaced(
    name: str, destination: str, tmp_path: Path, calibrate_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put, words = DESTINATIONS[destination]
    argument, what = WRITERS[name]
    put(tmp_path / "full")
    text = refusal(
        capsys,
        name,
        argument.replace("CONFIG", str(calibrate_yaml)).replace("TRAIN", f"{tmp_path}/train.yaml"),
        f"output_dir={tmp_path}",
    )
    assert f"cannot write the {what} {tmp_path / 'full'}: " in text
    assert words in text


@pytest.mark.parametrize("name", WRITERS)
def test_an_output_folder_that_cannot_be(
    name: str, tmp_path: Path, calibrate_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argument = WRITERS[name][0].replace("CONFIG", str(calibrate_yaml)).replace("TRAIN", f"{tmp_path}/train.yaml")
    text = refusal(capsys, name, argument, f"output_dir={calibrate_yaml}/out")
    assert f"{calibrate_yaml} is no folder; choose another place" in text
    with small_disk(tmp_path / "disk", 1, "ro") as disk:
        text = refusal(capsys, name, argument, f"output_dir={disk}/out")
    assert f"{disk} cannot be written to; choose another place" in text


def test_a_full_disk_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only in the plan: the weights of the drafter are the first that do not fit."""
    with small_disk(tmp_path / "disk", 1) as disk:
        assert job("export").main([WRITERS["export"][0], f"output_dir={disk}"]) == 2
        said = capsys.readouterr().err
        assert not list(disk.iterdir())
    assert said.startswith(f"error: {disk}/")
    assert "No space left on device" in said
    assert "free some space and run the same command again" in said


def test_there_are_at_least_sixty() -> None:
    assert len(CASES) + len(PROMPTS) + len(CHECKPOINTS) >= 60
