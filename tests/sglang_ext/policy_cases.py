"""Policies for tests: tables of made-up costs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.policy.table import FORMAT


def table(lengths: Sequence[int], **values: Any) -> dict[str, Any]:
    """A draft costs what half a step does; half of them are accepted."""
    curves = [{"draft_steps": k, "requests": [1, 8], "step_ms": [10.0 + 4 * k, 12.0 + 6 * k]} for k in lengths]
    shares = [0.5] * max(lengths)
    return {"format_version": FORMAT, "curves": curves, "accepted_if_reached": shares} | values


def write_policy(file: Path, lengths: Sequence[int], **values: Any) -> str:
    file.write_text(json.dumps(table(lengths, **values)))
    return str(file)


ALWAYS = {"dwell_steps": 1, "rest_after_steps": 2}  # switch at every step, rest often
# as many expected tokens a second with any length, and little that is remembered: what the last steps accepted decides
NERVOUS = {"dwell_steps": 1, "rest_after_steps": 2, "half_life_steps": 2, "prior_verifications": 0.5, "margin": 0.0}
NERVOUS |= {"request_concentration": 0.5, "try_steps": 1, "try_cost": 0.5}
