"""Folders of PEFT adapters are refused as targets, in the plan of every command that takes one."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
from fixture_models import DRAFTERS, PROMPTS, TARGET, drafters_setting

LORA = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "r": 16}
HEADS = "drafters=[{name: a, draft_head: {kind: full}}]"
RAW = "calibrations=[{name: a, source: raw, rule: {kind: frspec, top_k: 8}}]"


def adapter(folder: Path, text: str = json.dumps(LORA)) -> Path:
    """What PEFT's save_pretrained leaves."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(text)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


COMMANDS = {
    "fetch": ["{target}"],
    "train": ["target={target}", HEADS],
    "calibrate": ["target={target}", RAW],
    "sweep": ["target={target}", drafters_setting(DRAFTERS["full"]), f"workload={PROMPTS}:4"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("beside_a_model", [False, True])
def test_every_plan_refuses_one(
    name: str, beside_a_model: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "lora"
    if beside_a_model:
        shutil.copytree(TARGET, folder)
    adapter(folder)
    arguments = [argument.replace("{target}", str(folder)) for argument in COMMANDS[name]]
    assert importlib.import_module(f"rayspec.commands.{name}").main([*arguments, "--plan"]) == 2
    said = capsys.readouterr().err
    assert "holds a LORA adapter of meta-llama/Llama-3.1-8B-Instruct (adapter_config.json)" in said
    assert "merge the adapter into its model first" in said
    assert "merge_and_unload()" in said
    assert not (tmp_path / "home").exists()


def test_an_adapter_that_says_nothing_is_one_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rayspec.commands.fetch import main

    assert main([str(adapter(tmp_path / "lora", "{")), "--plan"]) == 2
    assert "holds a PEFT adapter of an unnamed model" in capsys.readouterr().err
