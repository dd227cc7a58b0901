"""The target's own answers: what drafters are trained and measured on.

A folder of safetensors shards and `answers.json` (which target, which settings, totals). One shard is one batch of
conversations; a killed run goes on with the first missing shard. N = sequences, L = longest sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from rayspec.identity import differences
from sglang_ext.folders import save_tensors
from sglang_ext.settings import Settings
from sglang_ext.whole import whole_file, write_whole

if TYPE_CHECKING:
    from rayspec.training.data.chat import ChatTemplate

FORMAT_VERSION = 2
INDEX = "answers.json"
# messages in the user's place; drawing them without a cut-off at top-p, which would sort the vocabulary at every token,
# wants a lower temperature than the 1.0 of Magpie
WRITING_TEMPERATURE = 0.8
# How requests of users begin. Every other message begins as the target likes, which for a small one is much the same
# again and again: a drafter of those alone is worse on users' requests (docs/results/smollm2-training).
OPENINGS = (
    "Write", "Explain", "Rewrite", "How", "Translate", "Summarize", "Write a Python function", "What", "Why", "Give me",
    "Fix", "Compute", "Who",
)  # fmt: skip
TEMPLATE_TOKENS = 64  # more than the chat templates of the field put around a message


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(Settings):
    """How many prompts of what length are answered, and how.

    `prompts`: `self`, which the target writes itself; a workload (`name`, `file.jsonl`, as in sweeps; not one that is
    for evaluation); a folder of text files, whose cut pieces the target continues; `training` or `held_out`, the same
    of the Python source on this machine.

    `as_given`: conversations of `prompts` are taken with the answers that they hold, and the target answers nothing.
    """

    prompts: str = "self"
    # how messages begin that the target writes in the user's place, in turn; "" leaves it to the target
    openings: list[str] = field(default_factory=lambda: [text for opening in OPENINGS for text in ("", opening)])
    count: int = 3072
    min_prompt_tokens: int = 8
    max_prompt_tokens: int = 160
    answer_tokens: int = 160
    follow_up_share: float = 0.0  # of the conversations; they go on for a second turn, which the target writes, too
    greedy_share: float = 0.5  # of the sequences; the rest is drawn at `temperature`
    temperature: float = 0.8
    batch_size: int = 128  # sequences generated together, one shard
    seed: int = 0
    as_given: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "min_prompt_tokens", "answer_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError(
                f"max_prompt_tokens must be at least min_prompt_tokens ({self.min_prompt_tokens}), "
                f"got {self.max_prompt_tokens}"
            )
        for name in ("greedy_share", "follow_up_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        if self.as_given:
            self._check_given()
        if not self.openings:
            raise ValueError('openings must have at least one entry; [""] leaves the first word to the target')
        if self.temperature < 0.0 or (self.temperature == 0.0 and self.greedy_share < 1.0):
            raise ValueError(f"temperature must be above 0 (greedy_share: 1 for greedy), got {self.temperature}")

    def _check_given(self) -> None:
        if self.prompts == "self":
            raise ValueError(
                "as_given takes conversations with their answers, but prompts=self has the target write its prompts, "
                "which have none; name a file of conversations with prompts=file.jsonl, or leave as_given out"
            )
        for f in fields(self):
            if f.name in ("greedy_share", "temperature") and getattr(self, f.name) != f.default:
                given = f"{f.name} says how the target answers, but with as_given it does not"
                raise ValueError(f"{given} (got {getattr(self, f.name)}); leave one of the two out")

    def provenance(self) -> dict[str, Any]:
        """What answers.json says of the settings."""
        return {name: value for name, value in asdict(self).items() if name != "as_given" or value}

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.batch_size)

    def is_greedy(self, index: int) -> bool:
        """Spread evenly: every shard mixes both kinds."""
        return int((index + 1) * self.greedy_share) > int(index * self.greedy_share)

    @property
    def most_tokens(self) -> int:
        """Of a sequence, the chat template's included."""
        turns = 2 if self.follow_up_share else 1
        return turns * (self.max_prompt_tokens + TEMPLATE_TOKENS + self.answer_tokens)

    def temperature_of(self, index: int) -> float:
        """NaN where it is not the target that answers."""
        if self.as_given:
            return math.nan
        return 0.0 if self.is_greedy(index) else self.temperature

    def has_follow_up(self, index: int) -> bool:
        return int((index + 1) * self.follow_up_share) > int(index * self.follow_up_share)


@dataclass(frozen=True)
class Request:
    """One continuation that the target is asked for."""

    prompt_ids: Sequence[int]
    temperature: float  # 0 = greedy
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()  # beside those of the target


Answerer = Callable[[Sequence[Request]], list[list[int]]]
"""Continues each prompt; the stop token that ended it is the last one."""


@dataclass(frozen=True)
class Prompt:
    """`ids`: up to where the first answer begins; `text`: what is asked. `later_turns`: what the user says after each
    answer. `answers`: those that are taken as they are."""

    text: str
    ids: Sequence[int]
    later_turns: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


@dataclass
class _Row:
    """A sequence in the making."""

    ids: list[int]
    mask: list[bool]
    later_turns: list[str] = field(default_factory=list)

    def add(self, ids: Sequence[int], is_answer: bool) -> None:
        self.ids += ids
        self.mask += [is_answer] * len(ids)


@dataclass(frozen=True)
class AnswerSet:
    """A conversation in one row, left-aligned, padded with 0 on the right."""

    name: str
    sha256: str
    token_ids_NL: Tensor  # int32
    loss_mask_NL: Tensor  # bool, true on answer tokens
    prompt_length_N: Tensor  # int32, up to the first answer
    length_N: Tensor  # int32, all of it
    temperature_N: Tensor  # float32, 0 = greedy, NaN = not the target's answers

    def __len__(self) -> int:
        return self.token_ids_NL.shape[0]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.loss_mask_NL.sum())

    def provenance(self) -> dict[str, Any]:
        given = int(self.temperature_N.isnan().sum())
        return {
            "answers": self.name,
            "sha256": self.sha256,
            "sequences": len(self),
            "answer_tokens": self.num_answer_tokens,
            "greedy_sequences": int((self.temperature_N == 0).sum()),
            **({"sequences_as_given": given} if given else {}),
        }


@dataclass(frozen=True)
class TargetName:
    """Which model answered."""

    name: str
    sha256: str


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"answers-{index:05d}.safetensors"


def read_index(folder: Path, way_out: str) -> dict[str, Any]:
    """answers.json of a folder. Raises ValueError where it is none."""
    try:
        index = json.loads((folder / INDEX).read_text())
        _ = index["target_sha256"][:12], index["config"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} does not say whose the answers are ({error!r}); {way_out}") from error
    return index


def check_index(folder: Path, target_sha256: str, config: AnswersConfig) -> None:
    """Raise ValueError if the folder holds answers of another target or made with other settings; those of a smaller
    count can be added to."""
    if not (folder / INDEX).is_file():
        return
    way_out = "name another folder with work_dir=..., or delete this one to have it made again"
    index = read_index(folder, way_out)
    if index["target_sha256"] != target_sha256:
        raise ValueError(
            f"the answers in {folder} come from another target (sha256 {index['target_sha256'][:12]}..., this target "
            f"{target_sha256[:12]}...); a drafter learns its own target's answers: {way_out}"
        )
    wanted, made = config.provenance(), {"openings": [""], **index["config"]}  # which older folders do not name
    if wanted["count"] > made.get("count", 0) and made.get("count", 0) % config.batch_size == 0:
        made["count"] = wanted["count"]  # more of the same: whole shards stay as they are
    for key, was, now in differences(made, wanted):
        raise ValueError(f"the answers in {folder} were made with answers.{key}={was}, not {now}; {way_out}")


def missing_shards(folder: Path, config: AnswersConfig) -> list[int]:
    return [i for i in range(config.num_shards) if not shard_path(folder, i).is_file()]


def make_answers(
    folder: Path,
    target: TargetName,
    config: AnswersConfig,
    prompts: Sequence[Prompt],
    answer: Answerer,
    chat: ChatTemplate | None = None,
) -> None:
    """Answer the prompts into `folder`; shards that exist are kept. `chat`: for prompts with later turns, follow-ups
    and answers as given. Raises ValueError as `check_index`."""
    check_index(folder, target.sha256, config)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "target": target.name,
        "target_sha256": target.sha256,
        "config": config.provenance(),
    }
    write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
    todo = missing_shards(folder, config)
    with tqdm(desc=f"answers: {folder.name}", unit="shard", total=config.num_shards, disable=not todo) as bar:
        bar.update(config.num_shards - len(todo))
        for shard in todo:
            first = shard * config.batch_size
            numbers = range(first, min(first + config.batch_size, config.count))
            own = [prompts[n] for n in numbers]
            if config.as_given:
                rows = _as_given(numbers, own, config, chat)
            else:
                rows = _converse(numbers, own, config, answer, chat)
            temperature_B = torch.tensor([config.temperature_of(n) for n in numbers])
            _write_shard(shard_path(folder, shard), [len(prompts[n].ids) for n in numbers], rows, temperature_B)
            bar.set_postfix_str(f"{sum(sum(row.mask) for row in rows)} answer tokens in the last", refresh=False)
            bar.update()
    answer_set = read_answers(folder)
    write_whole(folder / INDEX, json.dumps({**index, "totals": answer_set.provenance()}, indent=2) + "\n")


def _converse(
    numbers: range,
    prompts: Sequence[Prompt],
    config: AnswersConfig,
    answer: Answerer,
    chat: ChatTemplate | None,
) -> list[_Row]:
    """A batch of conversations, turn by turn. One goes on where its last answer was ended by the target itself."""
    rows = [_Row(list(p.ids), [False] * len(p.ids), list(p.later_turns)) for p in prompts]
    active = list(range(len(rows)))
    turn = 0
    while active:
        answers = _by_temperature(
            [Request(rows[i].ids, config.temperature_of(numbers[i]), config.answer_tokens) for i in active], answer
        )
        for i, ids in zip(active, answers, strict=True):
            rows[i].add(ids, is_answer=True)
        ended = [i for i, ids in zip(active, answers, strict=True) if len(ids) < config.answer_tokens]
        if turn == 0 and chat is not None:
            asking = [i for i in ended if not rows[i].later_turns and config.has_follow_up(numbers[i])]
            for i, text in zip(asking, _follow_ups([rows[i] for i in asking], config, answer, chat), strict=True):
                rows[i].later_turns += [] if text is None else [text]
        active = [i for i in ended if rows[i].later_turns]
        for i in active:
            assert chat is not None, "only chats have later turns"
            rows[i].add(chat.next_turn(rows[i].later_turns.pop(0)), is_answer=False)
        turn += 1
    return rows


def _as_given(
    numbers: range, prompts: Sequence[Prompt], config: AnswersConfig, chat: ChatTemplate | None
) -> list[_Row]:
    """Conversations with their own answers; the share of follow-ups has a second turn: its own."""
    assert chat is not None, "only chats have answers"
    rows = []
    for n, prompt in zip(numbers, prompts, strict=True):
        row, given = _Row(list(prompt.ids), [False] * len(prompt.ids)), prompt.answers[: 1 + config.has_follow_up(n)]
        for ids, is_answer in chat.as_given(given, prompt.later_turns, config.max_prompt_tokens, config.answer_tokens):
            row.add(ids, is_answer)
        rows.append(row)
    return rows


def _by_temperature(requests: Sequence[Request], answer: Answerer) -> list[list[int]]:
    """Requests of one temperature together: SGLang sorts the vocabulary for every token of a batch that mixes greedy
    ones with others."""
    answers: list[list[int]] = [[] for _ in requests]
    for temperature in sorted({r.temperature for r in requests}):
        own = [i for i, r in enumerate(requests) if r.temperature == temperature]
        for i, ids in zip(own, answer([requests[i] for i in own]), strict=True):
            answers[i] = ids
    return answers


def _follow_ups(rows: Sequence[_Row], config: AnswersConfig, answer: Answerer, chat: ChatTemplate) -> list[str | None]:
    """What the target, in the user's place, says next; None where that is nothing."""
    if not rows:
        return []
    opening = chat.encode(chat.reopen)
    stop = (chat.user_stop,)
    requests = [Request([*row.ids, *opening], WRITING_TEMPERATURE, config.max_prompt_tokens, stop) for row in rows]
    return [chat.message(ids) or None for ids in answer(requests)]


def _write_shard(path: Path, prompt_lengths: Sequence[int], rows: Sequence[_Row], temperature_B: Tensor) -> None:
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int32)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for n, row in enumerate(rows):
        ids[n, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int32)
        mask[n, : len(row.ids)] = torch.tensor(row.mask)
    tensors = {
        "token_ids": ids,
        "loss_mask": mask,
        "prompt_length": torch.tensor(prompt_lengths, dtype=torch.int32),
        "length": torch.tensor([len(row.ids) for row in rows], dtype=torch.int32),
        "temperature": temperature_B,
    }
    with whole_file(path) as draft:
        save_tensors(tensors, draft)


def _read_shard(file: Path) -> dict[str, Tensor]:
    """Raises ValueError for a file that is not whole, or holds something else."""
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}); delete it to have it made again") from error
    missing = {"token_ids", "loss_mask", "prompt_length", "length", "temperature"} - set(tensors)
    if missing:
        raise ValueError(f"{file} holds no answers ({', '.join(sorted(missing))} missing); name another folder")
    return tensors


def read_answers(folder: Path) -> AnswerSet:
    """All shards of a folder, padded to one width. Its name is the folder's, its sha256 that of the shards."""
    files = sorted(folder.glob("answers-*.safetensors")) if os.path.isdir(folder) else []
    if not files:
        raise ValueError(f"no answers in {folder}; rayspec train makes them")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    shards = [_read_shard(file) for file in files]
    width = max(s["token_ids"].shape[1] for s in shards)

    def rows(name: str) -> Tensor:
        return torch.cat([torch.nn.functional.pad(s[name], (0, width - s[name].shape[1])) for s in shards])

    def column(name: str) -> Tensor:
        return torch.cat([s[name] for s in shards])

    return AnswerSet(
        name=folder.name,
        sha256=digest.hexdigest(),
        token_ids_NL=rows("token_ids"),
        loss_mask_NL=rows("loss_mask"),
        prompt_length_N=column("prompt_length"),
        length_N=column("length"),
        temperature_N=column("temperature"),
    )
