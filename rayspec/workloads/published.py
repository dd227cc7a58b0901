"""Named sets: one that ships, and published ones from $RAYSPEC_DATA or from the Hugging Face hub."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rayspec.messages import first_line
from rayspec.shipped import ASSETS
from rayspec.workloads.records import Conversation, read_file, read_records

DATA_VARIABLE = "RAYSPEC_DATA"
SHIPPED: dict[str, Path] = {"chat": ASSETS / "prompts" / "chat.jsonl"}


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Arguments of `datasets.load_dataset`."""

    path: str
    name: str | None = None
    split: str

    def __str__(self) -> str:
        return f"{self.path} (split {self.split})"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A set that others publish. `tasks` renames categories of its records."""

    file: str  # under $RAYSPEC_DATA
    others: tuple[str, ...] = ()  # where else it may lie there
    source: str  # where people find it
    blank: str | None = None  # how a turn begins whose text its publisher leaves out, for others to fill in
    hub: HubDataset | None = None
    tasks: Mapping[str, str] = field(default_factory=dict)
    is_for_training: bool = False


_MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

PUBLISHED: dict[str, Published] = {
    "mt_bench": Published(
        file="mt_bench/question.jsonl",
        source="https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge/data/mt_bench",
        hub=HubDataset(path="philschmid/mt-bench", split="train"),
    ),
    "humaneval": Published(
        file="humaneval/HumanEval.jsonl.gz",
        source="https://github.com/openai/human-eval/tree/master/data",
        hub=HubDataset(path="openai/openai_humaneval", split="test"),
    ),
    "gsm8k": Published(
        file="gsm8k/test.jsonl",
        source="https://github.com/openai/grade-school-math/tree/master/grade_school_math/data",
        hub=HubDataset(path="openai/gsm8k", name="main", split="test"),
    ),
    "spec_bench": Published(
        file="spec_bench/question.jsonl",
        source="https://github.com/hemingkx/Spec-Bench/tree/main/data/spec_bench",
        # its authors report MT-Bench's eight categories as one of six tasks
        tasks=dict.fromkeys(_MT_BENCH_CATEGORIES, "mt_bench"),
    ),
    # what SpecFormer and SpecVocab train on, with the answers that it holds or the target's own
    "ultrachat": Published(
        file="ultrachat/train_sft.jsonl",
        source="https://huggingface.co/datasets/HuggingFaceH4/ultrachat_200k",
        hub=HubDataset(path="HuggingFaceH4/ultrachat_200k", split="train_sft"),
        is_for_training=True,
    ),
    # SPEED-Bench (Abramovich et al. 2026, arXiv 2604.09557): a category is the entropy of the answer in the throughput
    # splits, one of eleven domains in the qualitative one. The hub holds it with blanks that NVIDIA's scripts fill in:
    # as JSONL of `messages` (NeMo-Skills), or as parquet of `turns` (Model-Optimizer, examples/specdec_bench).
    **{
        f"speed_bench_{split}": Published(
            file=f"speed_bench/{split}.jsonl",
            others=(f"speed_bench/{split}/test.parquet", f"speed/{split}/test.parquet"),
            source=f"python prepare.py --config {split} (https://github.com/NVIDIA-NeMo/Skills, nemo_skills/dataset/"
            "speed-bench)",
            blank="FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH",
        )
        for split in ("qualitative", *(f"throughput_{n}k" for n in (1, 2, 8, 16, 32)))
    },
}


# what everybody reports; never trained on
EVALUATION_ONLY = frozenset(name for name, published in PUBLISHED.items() if not published.is_for_training)


def evaluation_sets() -> list[list[Conversation]]:
    """Those that ship, and those published ones that lie under $RAYSPEC_DATA."""
    root = os.environ.get(DATA_VARIABLE)
    names_of = PUBLISHED.items() if root is not None else ()
    local = [n for n, p in names_of if not p.is_for_training and _local(p) is not None]
    return [read_file(SHIPPED[n], n) for n in SHIPPED] + [
        _read(n, None) for n in local
    ]  # a blank hides no other prompt


def is_name(name: str) -> bool:
    return name in SHIPPED or name in PUBLISHED


def names() -> list[str]:
    return [*SHIPPED, *PUBLISHED]


def load_named(name: str, file: Path | None = None) -> list[Conversation]:
    """A named set, in its publisher's order, from `file` or from where it is found. Raises ValueError."""
    if name in SHIPPED:
        shipped = file or SHIPPED[name]
        if not shipped.is_file():
            raise ValueError(f"workload {name!r}: the shipped file {shipped} is missing; install the package anew")
        return read_file(shipped, name)
    found = _read(name, file)
    blank = PUBLISHED[name].blank
    blanks = [c for c in found if blank is not None and any(turn.startswith(blank) for turn in c.turns)]
    if blanks:
        raise ValueError(
            f"workload {name!r}: {len(blanks)} of {len(found)} conversations, the first of them {blanks[0].id}, hold "
            f"no text but a note that it must be fetched; fill them in with {PUBLISHED[name].source}"
        )
    return found


def _read(name: str, file: Path | None) -> list[Conversation]:
    published = PUBLISHED[name]
    file = file or _local(published)
    if file is None and published.hub is None:
        problem = "is on no hub" if published.blank is None else "is on the hub without its texts"
        raise ValueError(_way_out(name, problem))
    found = read_file(file, name) if file is not None else _from_hub(name, published)
    return [replace(c, category=published.tasks.get(c.category, c.category)) for c in found]


def _local(published: Published) -> Path | None:
    """Its file under $RAYSPEC_DATA."""
    root = os.environ.get(DATA_VARIABLE)
    files = [] if not root else [Path(root) / file for file in (published.file, *published.others)]
    return next((file for file in files if file.is_file()), None)


def _from_hub(name: str, published: Published) -> list[Conversation]:
    hub = published.hub
    assert hub is not None, "checked by the caller"
    load_dataset = _load_dataset()
    try:
        rows = load_dataset(hub.path, hub.name, split=hub.split)
    except Exception as error:  # offline, refused, renamed: the libraries below have an exception for each
        cause = first_line(error)
        raise ValueError(_way_out(name, f"could not be loaded from the Hugging Face hub: {cause}")) from error
    return read_records(enumerate(rows, start=1), str(hub), name)


def _load_dataset() -> Callable:
    from datasets import load_dataset  # seconds, and only here
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    return load_dataset


def _way_out(name: str, problem: str) -> str:
    published = PUBLISHED[name]
    root = os.environ.get(DATA_VARIABLE)
    state = f"{DATA_VARIABLE}={root} lacks {published.file}" if root else f"{DATA_VARIABLE} is not set"
    where = f"from {published.source}" if published.blank is None else f"by {published.source}"
    if published.hub is not None:
        where += f", or on a machine with network the dataset {published.hub.path} of the Hugging Face hub"
    return (
        f"workload {name!r} {problem}; and {state}. Get {Path(published.file).name} {where}, and put it at "
        f"${DATA_VARIABLE}/{published.file}, or name the file itself: workload={name}:/path/to/"
        f"{Path(published.file).name}:32"
    )
