"""The target's own answers: what drafters are trained and measured on.

A folder of shards (shards.py) and `answers.json` (which target, which settings, totals). One shard is one batch of
conversations that one engine holds from turn to turn; what is in it depends on its number and the seed, and a killed
run makes those that are missing. N = sequences, L = longest sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from rayspec.identity import differences
from rayspec.training.data.asking import Asking, Pool, Request, seed_of
from rayspec.training.data.shards import Row, read_shard, shard_files, write_shard
from rayspec.workloads.prompt_hashes import part_hashes
from sglang_ext.settings import Settings, require
from sglang_ext.whole import write_whole

if TYPE_CHECKING:
    from rayspec.training.data.chat import ChatTemplate

FORMAT_VERSION = 3  # 2: shards are safetensors, which are still read
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
    follow_up_share: float = 0.0  # share of the conversations with a second turn, which the target writes, too
    greedy_share: float = 0.5  # share of the sequences; the rest is drawn at `temperature`
    temperature: float = 0.8
    batch_size: int = 128  # sequences generated together, one shard
    seed: int = 0
    as_given: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "min_prompt_tokens", "answer_tokens", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        least = self.min_prompt_tokens
        is_in_order = self.max_prompt_tokens >= least
        require(is_in_order, "max_prompt_tokens", self.max_prompt_tokens, f"at least min_prompt_tokens ({least})")
        for name in ("greedy_share", "follow_up_share"):
            require(0.0 <= getattr(self, name) <= 1.0, name, getattr(self, name), "in 0..1")
        if self.as_given:
            self._check_given()
        if not self.openings:
            raise ValueError('openings must have at least one entry; [""] leaves the first word to the target')
        is_drawable = self.temperature > 0.0 or (self.temperature == 0.0 and self.greedy_share == 1.0)
        require(is_drawable, "temperature", self.temperature, "above 0 (greedy_share: 1 for greedy)")

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
        """The most tokens that a sequence may have, the chat template's included."""
        return self._turns * (self.max_prompt_tokens + TEMPLATE_TOKENS + self.answer_tokens)

    @property
    def most_answer_tokens(self) -> int:
        """Of all turns of a sequence."""
        return self._turns * self.answer_tokens

    @property
    def _turns(self) -> int:
        return 2 if self.follow_up_share else 1

    def temperature_of(self, index: int) -> float:
        """NaN where it is not the target that answers."""
        if self.as_given:
            return math.nan
        return 0.0 if self.is_greedy(index) else self.temperature

    def has_follow_up(self, index: int) -> bool:
        return int((index + 1) * self.follow_up_share) > int(index * self.follow_up_share)


@dataclass(frozen=True)
class Prompt:
    """`ids`: up to where the first answer begins; `text`: what is asked. `later_turns`: what the user says after each
    answer. `answers`: those that are taken as they are."""

    text: str
    ids: Sequence[int]
    later_turns: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


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
    there = shard_files(folder)
    return [i for i in range(config.num_shards) if i not in there]


def make_answers(
    folder: Path,
    target: TargetName,
    config: AnswersConfig,
    prompts: Sequence[Prompt],
    pool: Pool | None,
    chat: ChatTemplate | None = None,
    avoid: AbstractSet[str] = frozenset(),
) -> None:
    """Answer the prompts into `folder`; shards that exist are kept. `pool`: who answers; None where the answers are
    given. `chat`: for prompts with later turns, follow-ups and answers as given. `avoid`: hashes of what no follow-up
    may be. Raises ValueError as `check_index`."""
    check_index(folder, target.sha256, config)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "target": target.name,
        "target_sha256": target.sha256,
        "config": config.provenance(),
    }
    write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
    batches = {shard: batch_of(config, shard) for shard in missing_shards(folder, config)}
    own = {shard: (numbers, [prompts[n] for n in numbers]) for shard, numbers in batches.items()}
    done: Iterable[tuple[int, list[Row]]]
    if config.as_given:
        done = ((shard, _as_given(*piece, config, chat)) for shard, piece in own.items())
    else:
        assert pool is not None, "asked for only with engines"
        done = pool.run(
            {shard: partial(_converse, folder.name, *piece, config, chat, avoid) for shard, piece in own.items()}
        )
    with tqdm(desc=f"answers: {folder.name}", unit="sequence", total=config.count, disable=not own) as bar:
        bar.update(config.count - sum(map(len, batches.values())))
        tokens, since = 0, time.monotonic()
        for left, (shard, rows) in zip(reversed(range(len(own))), done, strict=True):
            write_shard(folder, shard, rows)
            tokens += sum(sum(row.mask) for row in rows)
            rate = tokens / (time.monotonic() - since)
            bar.set_postfix_str(f"{rate:.0f} answer tokens/s, {left} of {config.num_shards} shards left", refresh=False)
            bar.update(len(rows))
    answer_set = read_answers(folder)
    write_whole(folder / INDEX, json.dumps({**index, "totals": answer_set.provenance()}, indent=2) + "\n")


def batch_of(config: AnswersConfig, shard: int) -> range:
    """Numbers of the sequences of a shard."""
    first = shard * config.batch_size
    return range(first, min(first + config.batch_size, config.count))


def _converse(
    purpose: str,
    numbers: range,
    prompts: Sequence[Prompt],
    config: AnswersConfig,
    chat: ChatTemplate | None,
    avoid: AbstractSet[str],
) -> Asking[list[Row]]:
    """A batch of conversations, turn by turn. One goes on where its last answer was ended by the target itself."""
    rows = [_new_row(n, prompt, config) for n, prompt in zip(numbers, prompts, strict=True)]
    later_turns = [list(prompt.later_turns) for prompt in prompts]
    active = list(range(len(rows)))
    turn = 0
    while active:
        requests = [
            Request(row.ids, row.temperature, config.answer_tokens, seed=_seed(f"{purpose}/{turn}", row, config))
            for row in (rows[i] for i in active)
        ]
        answers = yield from _by_temperature(requests)
        for i, ids in zip(active, answers, strict=True):
            rows[i].add(ids, is_answer=True)
        ended = [i for i, ids in zip(active, answers, strict=True) if len(ids) < config.answer_tokens]
        if turn == 0 and chat is not None:
            asking = [i for i in ended if not later_turns[i] and config.has_follow_up(numbers[i])]
            texts = yield from _follow_ups(purpose, [rows[i] for i in asking], config, chat)
            for i, text in zip(asking, texts, strict=True):
                later_turns[i] += [] if text is None or part_hashes(text) & avoid else [text]
        active = []
        for i in (i for i in ended if later_turns[i]):
            assert chat is not None, "only chats have later turns"
            asked = chat.next_turn(later_turns[i].pop(0))
            # engines are started for so many tokens: what is longer ends here
            if len(rows[i].ids) + len(asked) + config.answer_tokens <= config.most_tokens:
                rows[i].set_end(chat.answer_stop)
                rows[i].add(asked, is_answer=False)
                active.append(i)
        turn += 1
    return rows


def _as_given(numbers: range, prompts: Sequence[Prompt], config: AnswersConfig, chat: ChatTemplate | None) -> list[Row]:
    """Conversations with their own answers; the share of follow-ups has a second turn: its own."""
    assert chat is not None, "only chats have answers"
    rows = []
    for n, prompt in zip(numbers, prompts, strict=True):
        row, given = _new_row(n, prompt, config), prompt.answers[: 1 + config.has_follow_up(n)]
        for ids, is_answer in chat.as_given(given, prompt.later_turns, config.max_prompt_tokens, config.answer_tokens):
            row.add(ids, is_answer)
        rows.append(row)
    return rows


def _new_row(number: int, prompt: Prompt, config: AnswersConfig) -> Row:
    row = Row(number, prompt.text, len(prompt.ids), config.temperature_of(number))
    row.add(prompt.ids, is_answer=False)
    return row


def _seed(purpose: str, row: Row, config: AnswersConfig) -> int | None:
    return seed_of(purpose, config.seed, row.number) if row.temperature else None


def _by_temperature(requests: Sequence[Request]) -> Asking[list[list[int]]]:
    """Requests of one temperature together: SGLang sorts the vocabulary for every token of a batch that mixes greedy
    ones with others."""
    answers: list[list[int]] = [[] for _ in requests]
    for temperature in sorted({r.temperature for r in requests}):
        own = [i for i, r in enumerate(requests) if r.temperature == temperature]
        found = yield [requests[i] for i in own]
        for i, ids in zip(own, found, strict=True):
            answers[i] = ids
    return answers


def _follow_ups(
    purpose: str, rows: Sequence[Row], config: AnswersConfig, chat: ChatTemplate
) -> Asking[list[str | None]]:
    """What the target, in the user's place, says next; None where that is nothing."""
    if not rows:
        return []
    opening = [chat.answer_stop, *chat.encode(chat.reopen)]
    stop = (chat.user_stop,)
    seeds = [seed_of(f"{purpose}/follow-up", config.seed, row.number) for row in rows]
    found = yield [
        Request([*row.ids[:-1], *opening], WRITING_TEMPERATURE, config.max_prompt_tokens, stop, seed)
        for row, seed in zip(rows, seeds, strict=True)
    ]
    return [chat.message(ids) or None for ids in found]


def read_answers(folder: Path) -> AnswerSet:
    """All shards of a folder, padded to one width. Its name is the folder's, its sha256 that of the shards."""
    files = list(shard_files(folder).values())
    if not files:
        raise ValueError(f"no answers in {folder}; rayspec prepare makes them, and rayspec train before it trains")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    shards = [read_shard(file) for file in files]
    width = max(int(shard.length_N.max()) for shard in shards)
    return AnswerSet(
        name=folder.name,
        sha256=digest.hexdigest(),
        token_ids_NL=torch.cat([shard.padded(shard.ids_M, width) for shard in shards]),
        loss_mask_NL=torch.cat([shard.padded(shard.mask_M, width) for shard in shards]),
        prompt_length_N=torch.cat([shard.prompt_length_N for shard in shards]),
        length_N=torch.cat([shard.length_N for shard in shards]),
        temperature_N=torch.cat([shard.temperature_N for shard in shards]),
    )
