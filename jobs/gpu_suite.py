"""`rayspec gpu-suite` as a script: it runs from a copy of the files, where torch and triton alone are installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from rayspec.commands.gpu_suite import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
