"""The folders that rayspec writes, and how each is told from one of somebody else's (`folders.py` writes them)."""

from pathlib import Path

from sglang_ext.folders import FolderKind
from sglang_ext.json_text import parse_json

WEIGHTS = "model.safetensors"
EXPORTED = "export.json"  # beside a stock drafter: its own config.json has no room for where it comes from
PACKED = "packed.json"  # beside a drafter that ships without the rows that its target has
POLICY = "policy.json"  # beside a champion: draft length by load, as it was measured
SERVING = "serving.json"  # beside a champion: what it was measured to be, and what it is served with
CALIBRATED, CALIBRATION_JSON = "calibration.safetensors", "calibration.json"
CONVERTED = "rayspec.json"  # beside a target made from a GGUF file: where it comes from


def _is_drafter(folder: Path) -> bool:
    """Whether rayspec wrote it, in its own form or the stock one."""
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (ValueError, OSError):
        return False
    return isinstance(config, dict) and ("rayspec" in config or (folder / EXPORTED).is_file())


DRAFTER = FolderKind(
    what="drafter",
    files=("config.json", WEIGHTS, EXPORTED, PACKED, POLICY, SERVING, "training.json", "training.png"),
    is_ours=_is_drafter,
)
CALIBRATION = FolderKind(
    what="calibration",
    files=(CALIBRATED, CALIBRATION_JSON, "coverage.png", "cluster_sizes.png", "utility.png"),
    is_ours=lambda folder: all((folder / name).is_file() for name in (CALIBRATED, CALIBRATION_JSON)),
)
ACCEPTANCE = "acceptance.json"  # the one of a winner's files that a simulator needs
READY_FILES = FolderKind(
    what="files of a winner",
    files=("serve.sh", ACCEPTANCE, POLICY, "adaptive.json", "vllm.sh", "rayservice.yaml"),
    is_ours=lambda folder: (folder / "serve.sh").is_file() and (folder / ACCEPTANCE).is_file(),
)
CONVERTED_TARGET = FolderKind(
    what="target",
    files=(
        CONVERTED,
        WEIGHTS,
        "config.json",
        "generation_config.json",
        "tokenizer*",
        "*.jinja",
        "special_tokens_map.json",
    ),
    is_ours=lambda folder: (folder / CONVERTED).is_file(),
)
