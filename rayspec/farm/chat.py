"""What is sent for a turn of a conversation.

With the chat template of the target's tokenizer, where it has one: token ids of the messages so far and of the
beginning of the next answer. Without one, plain text: the turn itself, and before it, separated by blank lines, the
system message and what was said before; an answer stands right behind what it answered, as the target continued it:

    system ⏎⏎ turn 1 answer 1 ⏎⏎ turn 2

So a single turn is sent as it is, and a later turn's prompt begins with what the target has already seen. A request of
a trace is token ids already.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from rayspec.workloads import Conversation
from rayspec.workloads.traces import TracedRequest

SEPARATOR = "\n\n"


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


def turn_request(conversation: Conversation, answers: Sequence[str], tokenizer: ChatTokenizer | None) -> dict[str, Any]:
    """`prompt` or `input_ids` for SGLang's generate: the turn after `answers`, the target's own to the turns before.

    `tokenizer` None, or one without a template, gives plain text. Raises ValueError where the template refuses.
    """
    if isinstance(conversation, TracedRequest):
        return {"input_ids": list(conversation.input_ids)}
    if tokenizer is None or not tokenizer.chat_template or not conversation.is_chat:
        return {"prompt": _plain(conversation, answers)}
    try:
        ids = tokenizer.apply_chat_template(
            _messages(conversation, answers), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template raises what it likes
        raise ValueError(
            f"the target's chat template refuses conversation {conversation.id}: {error}; chat_template=false sends "
            "plain text"
        ) from error
    return {"input_ids": list(ids)}


def _messages(conversation: Conversation, answers: Sequence[str]) -> list[dict[str, str]]:
    messages = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    for turn, answer in zip(conversation.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": conversation.turns[len(answers)]}]


def plain_text(conversation: Conversation) -> str:
    """All that the user says, and the system message before it."""
    return SEPARATOR.join([*([] if conversation.system is None else [conversation.system]), *conversation.turns])


def _plain(conversation: Conversation, answers: Sequence[str]) -> str:
    said = [turn + answer for turn, answer in zip(conversation.turns, answers, strict=False)]
    system = [] if conversation.system is None else [conversation.system]
    return SEPARATOR.join([*system, *said, conversation.turns[len(answers)]])
