"""What a sweep chooses between: made once, when it is planned, and handed on as it is to search, engines, MLflow and
report."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rayspec.sweep.shape import CHAIN, DraftShape, split_shape
from sglang_ext.adapter.algorithms import STOCK, swap_group
from sglang_ext.drafters import DEFAULT

Option = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Head:
    """A kind of draft head with its options, those that are unset left out. An option of a head in a head has its path
    for a name: `base.size` of an rdk head."""

    kind: str
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Self:
        """The head of a `draft_head` entry {kind, options}, such as `HeadConfig.spec`."""
        options = dict(_flat(spec))
        return cls(kind=str(options.pop("kind")), options=options)

    @property
    def numbers(self) -> dict[str, int | float]:
        """The options that are numbers: what can be searched along, and drawn against."""
        return {k: v for k, v in self.options.items() if isinstance(v, int | float) and not isinstance(v, bool)}

    @property
    def words(self) -> dict[str, Option]:
        """All other options."""
        return {k: v for k, v in self.options.items() if k not in self.numbers}

    def __str__(self) -> str:
        return ", ".join(f"{k}={text_of(v)}" for k, v in {"kind": self.kind, **self.options}.items())


def _flat(entry: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Option]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        elif value is not None:
            yield f"{path}{name}", tuple(value) if isinstance(value, list) else value


def text_of(option: Option) -> str:
    """The text that MLflow stores and tables show; a number is nothing but a number."""
    return str(list(option)) if isinstance(option, tuple) else str(option)


def option_of(text: str) -> Any:
    """Inverse of `text_of`. Of sweeps from before options were flat, also a mapping, and None."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A drafter's folder with its head, the shape of its draft and how many steps it has.

    `base` and `calibration` name what the head was made of, where it was not trained with its drafter; `is_made`: by a
    sweep, without training. `problem` is why it cannot be measured: its trials fail, the others do not.
    """

    label: str  # of the drafter, and of its shape where that is its own
    path: str
    head: Head = field(default=Head(kind="unknown"))
    draft_steps: int
    shape: DraftShape = CHAIN
    family: str = DEFAULT  # of the drafter
    algorithm: str = STOCK  # SGLang's or ours, which serves it
    base: str | None = None
    calibration: str | None = None
    is_made: bool = False
    body: object = field(default=None, hash=False)  # `fixed_body`: what only a new engine changes
    problem: str | None = None

    @property
    def drafter(self) -> str:
        """Its name, whatever its shape."""
        return split_shape(self.label)[0]

    def is_baseline(self, baseline: str) -> bool:
        """Whether it is this entry of `drafters`, in whatever shape: those of its engine are compared with it."""
        return self.drafter == split_shape(baseline)[0]

    @property
    def worker(self) -> str:
        """What an engine is started for, but for draft steps and body."""
        group = swap_group(self.algorithm)
        return group if self.shape.topk == 1 else f"{group}-{self.shape.label}"

    @property
    def engine(self) -> tuple[str, object, int]:
        """Those of one engine can be swapped for each other while it runs."""
        return self.worker, self.body, self.draft_steps

    @property
    def num_draft_tokens(self) -> int:
        """Verified nodes of a step, with the root."""
        return self.shape.verified(self.draft_steps)

    @property
    def series(self) -> str:
        """What the candidate is apart from its numbers: those of one series differ in numbers alone."""
        drafter = "" if self.algorithm == STOCK else f"{self.algorithm} "
        words = "".join(f", {text_of(v)}" for v in self.head.words.values())
        source = f" by {self.calibration}" if self.calibration else ""
        base = f"{' made' if self.is_made else ''} on {self.base}" if self.base else ""
        shape = "" if self.shape.topk == 1 else f" @{self.shape.label}"
        return f"{drafter}{self.head.kind}{words}{source}{base}{shape}"

    def params(self) -> dict[str, object]:
        """MLflow's parameters; inverse of `from_params`, but for what only an engine needs."""
        origin = {"drafter": self.base, "calibration": self.calibration, "family": self.family}
        origin |= {"made_by": "sweep"} if self.is_made else {}
        return {
            "speculative_algorithm": self.algorithm,
            "draft_steps": self.draft_steps,
            "head.checkpoint": self.path,
            "speculative_eagle_topk": self.shape.topk,
            "speculative_num_draft_tokens": self.num_draft_tokens,
            "head.kind": self.head.kind,
            **{f"head.{name}": text_of(value) for name, value in self.head.options.items()},
            **{f"origin.{name}": value for name, value in origin.items() if value is not None},
        }

    @classmethod
    def from_params(cls, label: str, params: Mapping[str, str]) -> Self:
        """The candidate of a run. Trials of old sweeps named no algorithm and no shape: EAGLE3, one shape for all."""
        own = {k.removeprefix("head."): v for k, v in params.items() if k.startswith("head.")}
        algorithm = params.get("speculative_algorithm", STOCK)
        topk = int(params.get("speculative_eagle_topk", params.get("sweep.topk", 1)))
        nodes = params.get("speculative_num_draft_tokens", params.get("sweep.num_draft_tokens"))
        return cls(
            label=label,
            path=own.pop("checkpoint"),
            head=Head.of({"kind": own.pop("kind", "unknown")} | {name: option_of(text) for name, text in own.items()}),
            draft_steps=int(params["draft_steps"]),
            shape=CHAIN if topk == 1 else DraftShape(topk=topk, num_draft_tokens=int(str(nodes))),
            family=params.get("origin.family", algorithm.lower()),
            algorithm=algorithm,
            base=params.get("origin.drafter"),
            calibration=params.get("origin.calibration"),
            is_made="origin.made_by" in params,
        )
