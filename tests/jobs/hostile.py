"""What the tests of bad inputs share: jobs called by their own `main`, and wrong values for every setting."""

from __future__ import annotations

import contextlib
import importlib
import io
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from small_world import World

FOLDER = Path(__file__).parents[2] / "jobs"
PATIENCE_S = 120  # for one input, on a machine that does other things


class Hung(BaseException):
    """An input that was not answered in time."""


@dataclass(frozen=True)
class Answer:
    """What a job said to its arguments. `trouble`: a traceback, or that it hung; None where it answered."""

    code: object
    out: str
    err: str
    trouble: str | None = None

    @property
    def is_refusal(self) -> bool:
        return self.trouble is None and self.code == 2 and ("error: " in self.err or "usage: " in self.err)


@cache
def main_of(job: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"rayspec.commands.{job}").main


def ask(job: str, *arguments: str, patience_s: int = PATIENCE_S) -> Answer:
    """Call a job's main in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    trouble = None
    before = signal.signal(signal.SIGALRM, _hung)
    on_terminate = signal.getsignal(signal.SIGTERM)
    signal.alarm(patience_s)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main_of(job)(list(arguments))
    except SystemExit as exit_:  # argparse
        code = exit_.code
    except Hung:
        trouble = f"no answer within {patience_s} s"
    except BaseException:
        trouble = traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGTERM, on_terminate)
    return Answer(code, out.getvalue(), err.getvalue(), trouble)


def _hung(signum: int, frame: object) -> None:
    raise Hung


def complaints(job: str, base: Iterable[str], cases: Iterable[tuple[list[str], tuple[str, ...]]]) -> list[str]:
    """Of (arguments, words that the refusal must hold), those that are not refused as they should be."""
    found = []
    for arguments, words in cases:
        answer = ask(job, *base, *arguments)
        shown = " ".join(a if len(a) < 100 else f"{a[:90]}...({len(a)})" for a in arguments)
        if answer.trouble is not None:
            found.append(f"TRACEBACK {shown}: {answer.trouble[-600:]}")
        elif not answer.is_refusal:
            found.append(f"ACCEPTED ({answer.code}) {shown}: {(answer.out + answer.err)[-300:]}")
        else:
            lacking = [word for word in words if word not in answer.err]
            if lacking:
                found.append(f"UNCLEAR {shown}: lacks {lacking} in {answer.err[-400:]}")
    return found


# --- wrong values by type

TOO_LONG = "1" + "0" * 25
WRONG: dict[Any, tuple[str, ...]] = {
    int: ("x", "1.5", "[1]", "true", "null", TOO_LONG),
    float: ("x", "{a: b}", ".nan", ".inf", "null"),
    bool: ("maybe", "7", "[true]"),
    str: ("[a]", "{a: b}", '"\\0"'),
    list: ("3", "{a: b}", "[[[1]]]", "[null]"),
    dict: ("3", "[1]", "null"),
}


def settings(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """(YAML path, type, whether it may be null) of every setting; int, float, bool, str, list, dict or a dataclass."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        kind = hints[field.name]
        is_optional = get_origin(kind) in (Union, UnionType)
        if is_optional:
            kind = next(k for k in get_args(kind) if k is not NoneType)
        path = f"{prefix}{field.name}"
        yield path, get_origin(kind) or kind, is_optional
        if is_dataclass(kind):
            yield from settings(kind, f"{path}.")  # type: ignore[arg-type]


def wrong_settings(schema: type, may_be_negative: Iterable[str] = ()) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """For every setting of a config: values of every wrong type, numbers that are none, and a key beside it."""
    for path, kind, is_optional in settings(schema):
        name = "early_stop" if ".early_stop." in path else path.rpartition(".")[2]
        if is_dataclass(kind):
            values: tuple[str, ...] = WRONG[dict]
            yield [f"{path}.nonsense=1"], ("unknown key", f"{path}.nonsense")
        else:
            values = WRONG[kind]
        for value in values:
            if value != "null" or not is_optional:
                yield [f"{path}={value}"], (name,)
        if kind in (int, float) and path not in may_be_negative:
            yield [f"{path}=-1"], (name,)


# --- arguments

Case = tuple[list[str], tuple[str, ...]]  # arguments of a job, words that its refusal must hold
JOBS = ("sweep", "train", "calibrate", "export", "gate")


def base(job: str, world: World, out: Path) -> list[str]:
    """Arguments with which the job's plan is in order."""
    if job == "sweep":
        return [
            *("--plan", f"target={world.target}", f"drafters=[{world.drafters}/full]", f"workload={world.prompts}"),
            *("max_new_tokens=16", "draft_steps=[2]"),
        ]
    if job == "train":
        return ["--plan", "--config", str(out / "train.yaml"), f"target={world.target}", f"output_dir={out / 'out'}"]
    if job == "calibrate":
        return [
            "--plan",
            "--config",
            str(out / "calibrate.yaml"),
            f"target={world.target}",
            f"output_dir={out / 'out'}",
        ]
    if job == "gate":
        drafter = str(world.drafters / "full")
        return [
            *("--plan", drafter, drafter, f"target={world.target}", f"workload={out / 'gate.jsonl'}"),
            *("max_new_tokens=16", "draft_steps=2"),
        ]
    assert job == "export", "every job is here"
    return ["--plan", f"drafters=[{world.drafters}/full]", f"output_dir={out / 'out'}"]


def one(argument: str, *words: str) -> Case:
    return [argument], words


FULL = "draft_head: {kind: full}"


JSON_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "deep": b"[" * 100_000,
    "nan": b'{"architectures": NaN}',
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "latin1": '{"a": "é"}'.encode("latin1"),
    "zero": b"\0" * 50,
}
