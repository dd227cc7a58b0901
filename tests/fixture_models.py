"""The small models that tests run on; tests/fixtures/README.md says what they are and how they are made."""

import json
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
TARGET = FIXTURES / "target"
PROMPTS = FIXTURES / "heldout_python.jsonl"
CALIBRATIONS = FIXTURES / "calibrations"
VOCABULARY, HIDDEN = 4096, 128


def drafter_folder(name: str) -> Path:
    return FIXTURES / "drafters" / name


DRAFTERS = {  # EAGLE-3, by the kind of head
    kind: drafter_folder(name)
    for kind, name in {
        "full": "full",
        "slimspec": "slimspec-r32",
        "truncated": "truncated",
        "truncated_by_step": "truncated-by-step",
        "specvocab": "specvocab",
        "dynaspec": "dynaspec",
        "coral": "coral",
        "rdk": "rdk",
        "int4": "slimspec-r32-int4",
    }.items()
}


def prompt_texts(count: int) -> list[str]:
    lines = PROMPTS.read_text().splitlines()
    assert len(lines) >= count
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def drafters_setting(*folders: Path) -> str:
    return f"drafters=[{','.join(map(str, folders))}]"


def sweep_settings(prompts: int) -> list[str]:
    """Arguments of rayspec sweep: the heads `full` and `slimspec-r32`, and so many prompts."""
    return [
        f"target={TARGET}",
        drafters_setting(DRAFTERS["full"], DRAFTERS["slimspec"]),
        f"workload={PROMPTS}:{prompts}",
    ]
