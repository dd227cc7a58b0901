"""Promises about the repository itself."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_kernels_folder_does_not_shadow_the_installed_package() -> None:
    """transformers and SGLang import an installed package named `kernels` (from the repository root, too)."""
    code = "import kernels, rayspec_kernels; print(kernels.__file__); print(rayspec_kernels.__file__)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installed, ours = (Path(line) for line in out.splitlines())
    assert ROOT / "kernels" not in installed.parents
    assert ours.is_relative_to(ROOT / "kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_imports_run_one_way() -> None:
    """jobs -> rayspec -> sglang_ext -> rayspec_kernels; only the adapter knows SGLang."""
    forbidden = {
        "kernels/rayspec_kernels": ("sglang", "ray", "rayspec", "mlflow", "sglang_ext"),
        "sglang_ext": ("ray", "rayspec", "mlflow"),
        "sglang_ext/heads": ("sglang",),
        "sglang_ext/drafters": ("sglang",),
        "sglang_ext/trees": ("sglang",),
        "rayspec": ("jobs",),
    }
    wrong = []
    for folder, names in forbidden.items():
        for file in (ROOT / folder).rglob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]) and words[1].split(".")[0] in names:
                    wrong.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert wrong == []


def test_pins_are_exact_and_without_addresses() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100
    assert [line for line in lines if "==" not in line or "/" in line.split(";")[0]] == []
