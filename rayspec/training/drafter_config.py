"""The configuration of drafter training: configs/train/drafters.yaml says only what differs from it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import PlainValidator

from rayspec.entries import entry_of
from rayspec.made_for import MadeForTarget
from rayspec.shipped import calibration_path, drafter_path
from rayspec.targets.catalogue import CATALOGUE, DEFAULT_TARGET
from rayspec.training.data.answer_engines import AnswerEnginesConfig
from rayspec.training.data.answers import AnswersConfig
from rayspec.training.data.sources import CorpusConfig
from rayspec.training.recipe import Recipe
from rayspec.training.trees import TreeConfig, parse_tree
from sglang_ext.drafters import DEFAULT, DrafterOptions, Family, family, parse_drafter
from sglang_ext.folders import check_name, check_unique
from sglang_ext.heads import HeadConfig, parse_head
from sglang_ext.settings import Settings, require

SETS = ("answers", "held_out")  # of answers, the settings and folders of each
HIDDEN_STATES = ("online", "offline")
DEFAULT_DRAFTER = parse_drafter({"kind": DEFAULT})
MAX_WORKERS = 1000  # Ray would wait for ever for machines that nobody has


@dataclass(frozen=True, kw_only=True)
class DrafterEntry(Settings):
    """One drafter to make. `draft_head`: {kind: ..., options} of sglang_ext.heads; `drafter`, of sglang_ext.drafters:
    {kind: eagle3}, {kind: eagle}, {kind: medusa, positions: 4, shared_head: false},
    {kind: hydra, ...}, {kind: independent, hidden_size: 64, num_layers: 2, ...}.

    `base`: a trained drafter with a full head (its name under output_dir, or a folder). Its body and its head's rows
    are taken over and frozen, only what the kind adds is trained (nothing for a truncated head), and the new drafter
    shares the base's tensors on disk. Or a drafter with this very head and other inference options (weight_format, size
    of a shortlist, clusters a row scores), which needs no training. None trains body and head from nothing.
    `train_body`: go on training the base's body and head instead of freezing them; the new drafter stores its own.
    `freeze_head`: train the body alone; the rows that the head takes from the target's stay as they are there.
    `artifacts`: the folder that rayspec calibrate wrote, for kinds that need ids or clusters. A truncated head without
    a `size` keeps as many tokens as the calibration chose.
    `tree`: which candidates of a medusa or hydra drafter are verified, as rayspec.training.trees makes it; None for a
    drafter that is only ever served as a chain. Of an eagle3 or eagle drafter, how its tree is pruned (kind slim); None
    for EAGLE-2's choice.
    """

    name: str
    draft_head: Annotated[HeadConfig, PlainValidator(parse_head)]
    base: str | None = None
    artifacts: str | None = None
    drafter: Annotated[DrafterOptions, PlainValidator(parse_drafter)] = DEFAULT_DRAFTER
    tree: Annotated[TreeConfig | None, PlainValidator(parse_tree)] = None
    freeze_head: bool = False
    train_body: bool = False

    def __post_init__(self) -> None:
        check_name(self.name, "drafters[].name")
        if self.train_body and self.base is None:
            raise ValueError(
                f"drafters[{self.name}].train_body goes on training the body of a base, but there is none; name one "
                "in base, or leave train_body out: without a base, body and head are trained anyway"
            )
        if self.freeze_head and not self.draft_head.taken_over:
            raise ValueError(
                f"drafters[{self.name}].freeze_head keeps rows of the target's head, but a {self.draft_head.kind} head "
                "has none; leave it out"
            )
        if self.tree is not None:
            self.family.config_class.check_tree(self.tree.kind, f"drafters[{self.name}].tree")

    @property
    def family(self) -> Family:
        return family(self.drafter.kind)

    def asked(self) -> dict[str, Any]:
        """What provenance names besides the head, every default written out; nothing for the default drafter but its
        tree, if it has one."""
        found: dict[str, Any] = {name: True for name in ("freeze_head", "train_body") if getattr(self, name)}
        if self.drafter != DEFAULT_DRAFTER:
            found |= {"drafter": self.drafter.entry(), "tree": None}
        return found if self.tree is None else {**found, "tree": entry_of(self.tree.kind, self.tree)}


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Settings):
    """Held-out acceptance is measured every `every` steps on `sequences` answers, at the end on all of them; then the
    drafter answers `served_prompts` of the held-out prompts in SGLang, which must accept what training says."""

    draft_steps: int = 5
    every: int = 250
    sequences: int = 24
    served_prompts: int = 8

    def __post_init__(self) -> None:
        for name in ("draft_steps", "every", "sequences"):
            require(getattr(self, name) >= 1, f"evaluation.{name}", getattr(self, name), "at least 1")
        require(self.served_prompts >= 0, "evaluation.served_prompts", self.served_prompts, "at least 0 (none)")


@dataclass(frozen=True, kw_only=True)
class WorkersConfig(Settings):
    """Training by `count` processes of Ray Train (docs/training.md).

    `num_cpus`, `num_gpus`: what Ray reserves for each. `shard_target`: each holds its part of the target's layers, for
    a target that does not fit one device. `max_failures`: how often all are started again from the newest checkpoint
    after one has died.
    """

    count: int = 1
    num_cpus: int = 1
    num_gpus: int = 0
    shard_target: bool = False
    max_failures: int = 3

    def __post_init__(self) -> None:
        for name in ("count", "num_cpus"):
            value = getattr(self, name)
            require(1 <= value <= MAX_WORKERS, f"workers.{name}", value, f"at least 1 and at most {MAX_WORKERS}")
        if self.num_gpus not in (0, 1):
            raise ValueError(
                f"workers.num_gpus must be 0 or 1, since a worker computes on one, got {self.num_gpus}; more GPUs are "
                "more workers (workers.count)"
            )
        if self.shard_target and self.count == 1:
            raise ValueError(
                "workers.shard_target shares the target's layers out among workers, but workers.count is 1; raise it, "
                "or set shard_target=false"
            )
        require(self.max_failures >= 0, "workers.max_failures", self.max_failures, "at least 0")


DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class DrafterTrainConfig(MadeForTarget):
    """Answers are made once; then every drafter of `drafters` is trained on them with the same recipe.

    `hidden_states`: the target's, which drafters read along the answers: `online`, computed at each training step, or
    `offline`, computed once for all drafters and stored under work_dir (`--plan` says how large they are).
    `device`: auto takes a CUDA GPU where there is one, and under `workers` where they have one each. `workers`: None
    trains in this process.
    """

    makes: ClassVar[str] = "drafters"

    target: str = DEFAULT_TARGET  # a fetched target, or a Hugging Face folder
    output_dir: str | None = None  # output_dir/<name>/ is the drafter; None = the home folder's drafters/<target>
    work_dir: str | None = None  # answers and unfinished training; None = the home folder's training/<target>
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    held_out: AnswersConfig = field(default_factory=lambda: AnswersConfig(count=128, greedy_share=1.0, seed=1))
    engines: AnswerEnginesConfig = field(default_factory=AnswerEnginesConfig)  # that make the answers
    hidden_states: str = "online"
    recipe: Recipe = field(default_factory=Recipe)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = DEVICES[0]
    workers: WorkersConfig | None = None
    drafters: list[DrafterEntry] = field(default_factory=list)
    checkpoint_every: int = 100  # steps
    log_every: int = 10  # steps
    mlflow: bool = True
    num_threads: int | None = None  # None = torch's own choice, the number of cores

    def __post_init__(self) -> None:
        if not self.drafters:
            raise ValueError("drafters is empty; give a list such as [{name: full, draft_head: {kind: full}}]")
        names = [entry.name for entry in self.drafters]
        check_unique(names, "drafters[].name")
        frozen = [entry.name for entry in self.drafters if entry.base is not None and not entry.train_body]
        if self.recipe.csra_weight and frozen:
            raise ValueError(
                f"recipe.csra_weight={self.recipe.csra_weight} trains the drafter's body, but "
                f"drafters[{frozen[0]}].base takes over a body and freezes it; set train_body or leave base out to "
                "train it, or set recipe.csra_weight=0"
            )
        others = [entry.name for entry in self.drafters if not entry.family.config_class.feeds_back]
        if self.recipe.csra_weight and others:
            raise ValueError(
                f"recipe.csra_weight={self.recipe.csra_weight} aligns the draft steps of a body that reads what "
                f"it made, which drafters[{others[0]}] has not; train it in a run of its own with recipe.csra_weight=0"
            )
        allowed = f"one of {', '.join(HIDDEN_STATES)}"
        require(self.hidden_states in HIDDEN_STATES, "hidden_states", self.hidden_states, allowed)
        self._check_workers()
        for name in ("checkpoint_every", "log_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        is_threads = self.num_threads is None or self.num_threads >= 1
        require(is_threads, "num_threads", self.num_threads, "at least 1")

    def _check_workers(self) -> None:
        require(self.device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        if self.workers is None:
            return
        if self.device == ("cpu" if self.workers.num_gpus else "cuda"):
            raise ValueError(
                f"device={self.device} contradicts workers.num_gpus={self.workers.num_gpus}; leave device at auto, "
                "which follows num_gpus"
            )
        count, pieces = self.workers.count, self.recipe.accumulate
        if count * pieces > self.recipe.batch_size:
            raise ValueError(
                f"recipe.batch_size={self.recipe.batch_size} sequences an update cannot be shared out among "
                f"workers.count={count} with recipe.accumulate={pieces} pieces each; it must be at least "
                f"{count * pieces}"
            )
        if self.recipe.csra_weight and count > 1:
            raise ValueError(
                f"recipe.csra_weight={self.recipe.csra_weight} compares each row with all others of its update, which "
                f"workers.count={count} share out; set workers.count=1, or recipe.csra_weight=0"
            )

    @property
    def sequences_at_once(self) -> int:
        """The most that a worker computes together."""
        pieces = self.recipe.accumulate * (1 if self.workers is None else self.workers.count)
        return -(-self.recipe.batch_size // pieces)

    @property
    def training_device(self) -> torch.device:
        """The device of this process, or of each worker."""
        if self.workers is not None:
            return torch.device("cuda" if self.workers.num_gpus else "cpu")
        if self.device == DEVICES[0]:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def target_dtype(self) -> torch.dtype:
        """The type in which the target runs beside the training. Workers without a GPU are taken to have this machine's
        kind of processor."""
        return torch.bfloat16 if self.recipe.in_bfloat16(self.training_device) else torch.float32

    def base_folder(self, entry: DrafterEntry) -> Path | None:
        """Raises ValueError if the base is neither a drafter of this run nor a folder."""
        if entry.base is None:
            return None
        own = self.output_folder / entry.base
        if (own / "config.json").is_file():
            return own
        try:
            return Path(drafter_path(entry.base, self.target))
        except ValueError as error:
            raise ValueError(
                f"drafters[{entry.name}].base is {entry.base!r}: not under {self.output_folder}, and {error}; train it "
                "first, in a run of its own or earlier in the list"
            ) from error

    def resolved(self) -> DrafterTrainConfig:
        """The same for engines and workers elsewhere: with every folder in full, since their current folder is another
        one, and in the precision of `target_dtype`. A target that is named stays a name, and is looked for under
        RAYSPEC_HOME; so does a base that is still to be trained."""
        target = os.path.expanduser(self.target)
        is_folder = self.target not in CATALOGUE and os.path.isdir(target)
        return replace(
            self,
            target=os.path.abspath(target) if is_folder else self.target,
            output_dir=os.path.abspath(self.output_folder),
            work_dir=os.path.abspath(self.work_folder),
            drafters=[self._absolute_entry(entry) for entry in self.drafters],
            recipe=replace(self.recipe, bfloat16=self.target_dtype == torch.bfloat16),
        )

    def _absolute_entry(self, entry: DrafterEntry) -> DrafterEntry:
        with suppress(ValueError):
            base = self.base_folder(entry)
            entry = replace(entry, base=None if base is None else os.path.abspath(base))
        with suppress(ValueError):
            found = None if entry.artifacts is None else calibration_path(entry.artifacts, self.target)
            entry = replace(entry, artifacts=found)
        return entry
