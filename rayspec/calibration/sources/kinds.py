"""What can be counted: raw text, the target's own answers, or a drafter's proposals or text.

A source says what it is (`describe`, without Ray), and counts its tokens part by part on Ray Data (`counts`).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rayspec.calibration.counting import pair_ids, partial_counts
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.config import MAX_SEED
from rayspec.entries import parse
from rayspec.shipped import drafter_label, drafter_path
from rayspec.training.data.answers import AnswerSet, read_answers, read_index
from rayspec.training.data.sources import CorpusConfig
from rayspec.training.frozen_target import target_sha256
from sglang_ext import DRAFT_STEPS
from sglang_ext.drafters import family
from sglang_ext.settings import Settings, require

if TYPE_CHECKING:
    import ray.data

    from sglang_ext.drafters.base import DrafterConfig

TENSORS = ("token_ids_NL", "loss_mask_NL", "prompt_length_N", "length_N", "temperature_N")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the sources of one configuration share. `work_folder`: where rayspec train left the target's answers."""

    target_folder: str
    target_name: str  # by which its drafters are found; a model of the hub lies in a folder of another name
    tokenizer_sha256: str
    work_folder: Path
    corpus: CorpusConfig

    @cached_property
    def target_sha256(self) -> str:
        return target_sha256(self.target_folder)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast  # takes seconds

        return PreTrainedTokenizerFast.from_pretrained(self.target_folder, local_files_only=True).backend_tokenizer


@dataclass(frozen=True, kw_only=True)
class Source(Settings, ABC):
    kind: ClassVar[str]

    @abstractmethod
    def describe(self, context: Context) -> dict[str, Any]:
        """Name and `sha256` of what is counted, as JSON values. Raises ValueError where it cannot be."""

    @abstractmethod
    def counts(self, context: Context, blocks: int) -> ray.data.Dataset:
        """Partial counts of tokens (rayspec.calibration.counting), worked on in about `blocks` parts."""

    def pair_counts(self, context: Context, blocks: int) -> ray.data.Dataset:
        """Partial counts of neighbouring pairs within a document; rules that need them name the sources that have
        them."""
        raise NotImplementedError(f"sources of kind {self.kind!r} have no pairs")


@dataclass(frozen=True, kw_only=True)
class RawText(Source):
    """`documents`: training or held_out (of the corpus), a folder of text files, or a JSONL file."""

    kind: ClassVar[str] = "raw"
    documents: str = "training"

    def describe(self, context: Context) -> dict[str, Any]:
        from rayspec.calibration.sources.texts import describe_texts  # imports Ray

        return describe_texts(self.documents, context.corpus)

    def counts(self, context: Context, blocks: int) -> ray.data.Dataset:
        from rayspec.calibration.sources.texts import counter_of, text_counts

        return text_counts(self.documents, context.corpus, counter_of(context.tokenizer), blocks)

    def pair_counts(self, context: Context, blocks: int) -> ray.data.Dataset:
        from rayspec.calibration.sources.texts import pair_counter_of, text_counts

        return text_counts(self.documents, context.corpus, pair_counter_of(context.tokenizer), blocks)


@dataclass(frozen=True, kw_only=True)
class TargetAnswers(Source):
    """The answer tokens, and no prompt, of the target's own answers. `answers`: their folder, None for that of
    rayspec train; `sequences`: the first so many, None for all."""

    kind: ClassVar[str] = "target"
    answers: str | None = None
    sequences: int | None = None

    def __post_init__(self) -> None:
        require(self.sequences is None or self.sequences >= 1, "sequences", self.sequences, "at least 1")

    def read(self, context: Context) -> AnswerSet:
        """Raises ValueError if they are missing or another tokenizer's."""
        folder = Path(self.answers) if self.answers else context.work_folder / "answers"
        found = read_answers(folder)
        made_by = read_index(folder, "make the answers again with rayspec train")["target_sha256"]
        if made_by != context.target_sha256:
            raise ValueError(
                f"the answers in {folder} come from another target (sha256 {made_by[:12]}..., this target "
                f"{context.target_sha256[:12]}...); name this target's own with sources.*.answers or held_out, or make "
                "them with rayspec train"
            )
        tensors = {name: getattr(found, name)[: self.sequences] for name in TENSORS}
        return replace(found, **tensors)

    def describe(self, context: Context) -> dict[str, Any]:
        return self.read(context).provenance()

    def counts(self, context: Context, blocks: int) -> ray.data.Dataset:
        answers = self.read(context)
        return _counts_of(answers.token_ids_NL[answers.loss_mask_NL].long().numpy(), blocks)

    def pair_counts(self, context: Context, blocks: int) -> ray.data.Dataset:
        """Counts of pairs (token before, answer token); the token before an answer is the prompt's last."""
        answers = self.read(context)
        mask_NL = answers.loss_mask_NL[:, 1:]
        first, second = (ids[mask_NL].numpy() for ids in (answers.token_ids_NL[:, :-1], answers.token_ids_NL[:, 1:]))
        return _counts_of(pair_ids(first, second), blocks)


def _counts_of(ids: np.ndarray, blocks: int) -> ray.data.Dataset:
    import pyarrow as pa
    import ray.data

    parts = np.array_split(ids, max(1, min(blocks, len(ids))))
    dataset = ray.data.from_arrow([pa.table({"id": part}) for part in parts])
    return dataset.map_batches(lambda batch: partial_counts(batch["id"]), batch_size=None, batch_format="numpy")


@dataclass(frozen=True, kw_only=True)
class OfDrafter(TargetAnswers):
    """Tokens of a trained drafter, which those answers' sequences are shown to. `drafter`: a shipped name or a folder;
    `temperature` 0 for its likeliest token, above 0 to draw."""

    drafter: str = "full"
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 16  # sequences

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.batch_size <= 2**16, "batch_size", self.batch_size, f"in 1..{2**16}")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in 0..{MAX_SEED}")
        require(self.temperature >= 0.0, "temperature", self.temperature, "at least 0")

    @abstractmethod
    def steps(self) -> dict[str, int]:
        """How far it drafts: the option and its value."""

    @abstractmethod
    def check(self, answers: AnswerSet, body: DrafterConfig) -> None:
        """Raise ValueError for answers or a drafter that it cannot be made of."""

    def stop_ids(self, context: Context) -> tuple[int, ...] | None:
        """Which tokens end a text; None for proposals along answers."""
        return None

    def describe(self, context: Context) -> dict[str, Any]:
        from sglang_ext.drafters.checkpoint_config import read_info

        folder = Path(drafter_path(self.drafter, context.target_name))
        info, answers = read_info(folder), self.read(context)
        if info.target is not None and info.target.tokenizer_sha256 != context.tokenizer_sha256:
            raise ValueError(
                f"sources.*.drafter={self.drafter} was trained for target {info.target.name!r}, whose tokenizer is "
                "another; name a drafter of this target"
            )
        self.check(answers, info.body)
        what = {
            **answers.provenance(),
            "drafter": drafter_label(self.drafter),
            "drafter_sha256": _files_sha256(folder),
            **self.steps(),
            "temperature": self.temperature,
            "seed": self.seed,
            # a batch draws from one stream of random numbers
            **({"batch_size": self.batch_size} if self.temperature > 0 else {}),
            **({} if (stop_ids := self.stop_ids(context)) is None else {"stop_ids": list(stop_ids)}),
        }
        return {**what, "sha256": hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()}

    def counts(self, context: Context, blocks: int) -> ray.data.Dataset:
        import pyarrow as pa
        import ray.data

        from rayspec.calibration.sources.drafts import DraftSettings, answer_columns, count_drafts

        table = pa.table(answer_columns(self.read(context)))
        rows = max(1, -(-len(table) // blocks // self.batch_size)) * self.batch_size  # a part is whole batches
        dataset = ray.data.from_arrow([table.slice(start, rows) for start in range(0, len(table), rows)])
        (steps,) = self.steps().values()
        return dataset.map_batches(
            count_drafts,
            fn_args=(
                str(Path(context.target_folder).resolve()),
                drafter_path(self.drafter, context.target_name),
                DraftSettings(steps=steps, temperature=self.temperature, seed=self.seed),
                self.stop_ids(context),
            ),
            batch_size=self.batch_size,
            batch_format="numpy",
        )


@dataclass(frozen=True, kw_only=True)
class DraftTokens(OfDrafter):
    """What the drafter proposes along the answers, at each of `draft_steps` steps."""

    kind: ClassVar[str] = "draft"
    draft_steps: int = DRAFT_STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.draft_steps <= 128, "draft_steps", self.draft_steps, "in 1..128")

    def steps(self) -> dict[str, int]:
        return {"draft_steps": self.draft_steps}

    def check(self, answers: AnswerSet, body: DrafterConfig) -> None:
        shortest = int(answers.prompt_length_N.min())
        if shortest < self.draft_steps + 1:
            raise ValueError(
                f"sources.*.draft_steps={self.draft_steps} needs prompts of at least {self.draft_steps + 1} tokens, "
                f"but {answers.name} has one of {shortest}; lower it"
            )


@dataclass(frozen=True, kw_only=True)
class DraftText(OfDrafter):
    """The text that the drafter writes by itself after each answer's (first) prompt, up to a stop token or `tokens`.

    Its first token is the drafter's, too, which in service is the target's; and a drafter that reads the target's
    states reads its own in their place from there on, in service for some steps alone."""

    kind: ClassVar[str] = "draft_text"
    tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.tokens <= 512, "tokens", self.tokens, "in 1..512")

    def steps(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def stop_ids(self, context: Context) -> tuple[int, ...] | None:
        return Vocabulary.load(context.target_folder, context.target_name).stop_ids

    def check(self, answers: AnswerSet, body: DrafterConfig) -> None:
        if not hasattr(family(body.kind).training, "write"):
            raise ValueError(
                f"sources.*.drafter={self.drafter} is of kind {body.kind}, which cannot go on from its own tokens "
                "without the target's states; use kind: draft for its proposals, or name another drafter"
            )
        shortest, longest = (int(length) for length in answers.prompt_length_N.aminmax())
        room = body.max_position_embeddings - longest
        if shortest < 2:
            raise ValueError(
                f"sources.*.answers: {answers.name} has a prompt of one token, after which a drafter, whose texts lack "
                "their first token, cannot write; name answers to longer prompts (answers.min_prompt_tokens of rayspec "
                "train)"
            )
        if self.tokens > room:
            way_out = f"lower it to {room}" if room > 0 else "name answers to shorter prompts, or another drafter"
            raise ValueError(
                f"sources.*.tokens={self.tokens} after a prompt of {longest} tokens in {answers.name} is more than the "
                f"{body.max_position_embeddings} positions of drafter {self.drafter}; {way_out}"
            )


def _files_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with file.open("rb") as handle:
            while part := handle.read(2**20):
                digest.update(part)
    return digest.hexdigest()


SOURCES: dict[str, type[Source]] = {cls.kind: cls for cls in (RawText, TargetAnswers, DraftTokens, DraftText)}


def parse_sources(entries: Any) -> dict[str, Source]:
    """The checked sources of a mapping {name: {kind: ..., options}}; the raw corpus, as `raw`, where it is empty.
    Raises ValueError for what it should not hold."""
    if not isinstance(entries, Mapping):
        raise ValueError(f"sources must be a mapping, {{name: {{kind: ..., options}}}}, got {entries!r}")
    return {name: parse(SOURCES, entry, f"sources.{name}") for name, entry in entries.items()} or {"raw": RawText()}
