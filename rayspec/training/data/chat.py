"""A target's chat template as token ids: where a turn of the user begins, and how an answer is asked for.

The template is rendered once with marks in place of the messages, and cut at the marks; so a conversation grows by
appending ids, and the target's own answers keep the very ids that it gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

USER, ANSWER, NEXT = "\ue000user\ue000", "\ue000answer\ue000", "\ue000next\ue000"  # private use: no template has them


@dataclass(frozen=True)
class ChatTemplate:
    """Pieces of the template as text, and the tokenizer that turns them into ids."""

    tokenizer: Any
    opening: str  # up to the first message of the user
    ask: str  # between a message of the user and the answer
    reopen: str  # between an answer's stop token and the next message of the user
    user_stop: int  # the token that ends a message of the user
    answer_stop: int  # and an answer of the past; the target may end its own by another (GPT-OSS)
    takes_answers: bool = True  # what stands before an answer of the past is what asks for one

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Raises ValueError for a tokenizer without a template, or with one that cannot be cut so."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the target's tokenizer has no chat template, so it cannot write or answer chats; name a folder of "
                "text files (answers.prompts=/data/texts), whose beginnings it continues"
            )
        messages = [{"role": r, "content": c} for r, c in (("user", USER), ("assistant", ANSWER), ("user", NEXT))]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        opening, found, ask = first.partition(USER)
        before_answer, has_answer, after_answer = text.partition(ANSWER)
        reopen, has_next, ask_again = after_answer.partition(NEXT)
        if not (found and has_answer and has_next) or ask != ask_again:
            raise ValueError(
                "the target's chat template does not repeat its messages as they are; name a folder of text"
            )
        stop = tokenizer.encode(ask, add_special_tokens=False)[:1]
        if not stop or not _is_special(tokenizer, stop[0]):
            raise ValueError(
                "the target's chat template ends a message of the user by no special token; name a folder of text"
            )
        # what ends an answer is the end of text, or what ends a message of the user (Gemma's end of a turn)
        end, answer_stop = tokenizer.eos_token or "", tokenizer.eos_token_id
        if reopen.startswith(tokenizer.convert_ids_to_tokens(stop[0])):
            end, answer_stop = tokenizer.convert_ids_to_tokens(stop[0]), stop[0]
        reopen = reopen.removeprefix(end)
        return cls(tokenizer, opening, ask, reopen, stop[0], answer_stop, before_answer == opening + USER + ask)

    def check_takes_answers(self) -> None:
        """Raise ValueError where an answer that is given cannot stand behind what asks for one."""
        if not self.takes_answers:
            raise ValueError(
                "the target's chat template writes answers of the past otherwise than it asks for one (as with "
                "GPT-OSS's channels), so that answers cannot be taken as given; leave as_given out, so that it answers"
            )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def first_turn(self, message: str) -> list[int]:
        """The tokens from the beginning to where the first answer begins."""
        return self.encode(self.opening + message + self.ask)

    def next_turn(self, message: str) -> list[int]:
        """The tokens from behind an answer's stop token to where the next answer begins."""
        return self.encode(self.reopen + message + self.ask)

    def as_given(
        self, answers: Sequence[str], later_turns: Sequence[str], prompt_tokens: int, answer_tokens: int
    ) -> Iterator[tuple[list[int], bool]]:
        """(ids, whether they are an answer) of what stands behind a first turn: answers that are taken as they are,
        each with the stop token that would have ended it, and what the user says between them. An answer that is too
        long is cut; with it, or before a turn that is too long, the conversation ends. Raises ValueError as
        `check_takes_answers`."""
        self.check_takes_answers()
        for turn, answer in enumerate(answers):
            if turn > 0:
                asked = self.next_turn(later_turns[turn - 1])
                if len(asked) > prompt_tokens:
                    return
                yield asked, False
            ids = [*self.encode(answer), self.answer_stop]
            yield ids[:answer_tokens], True
            if len(ids) >= answer_tokens:
                return

    def message(self, ids: list[int], beginning: str = "") -> str | None:
        """The message of the user that the target wrote behind its `beginning`, None where it did not end."""
        if not ids or ids[-1] != self.user_stop:
            return None
        return (beginning + self.tokenizer.decode(ids[:-1])).strip()


def _is_special(tokenizer: Any, token: int) -> bool:
    """Named in the tokenizer's settings, as its end of text is, or only marked, as GPT-OSS's end of a message is."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or (added is not None and added.special)
