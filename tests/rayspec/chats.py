"""Tokenizers of chat models, and answerers that say what they are told."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from answerers import InTurn
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rayspec.training.data.asking import Request

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
HARMONY = (  # the form of GPT-OSS's: answers are in a channel, and what ends a message does not end an answer
    "<|im_start|>system<|message|>Be brief.<|im_end|>{% for m in messages %}<|im_start|>{{ m['role'] }}"
    "{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
TEMPLATES = {"plain": TURNS, "system": SYSTEM + TURNS}


def chat_tokenizer(folder: Path, template: str | None = TURNS, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """The byte tokenizer of `folder` with two special tokens more (257 and 258)."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    marks = [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "eos_token": eos})
    tokenizer.chat_template = template
    return tokenizer


class Scripted(InTurn):
    """Gives each batch of requests what `script` says, and remembers what was asked; a batch of None is a Ctrl-C."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *script: Sequence[str] | None) -> None:
        self.tokenizer = tokenizer
        self.script: Iterator[Sequence[str] | None] = iter(script)
        self.asked: list[list[Request]] = []
        super().__init__(self.said)

    def said(self, requests: Sequence[Request]) -> list[list[int]]:
        self.asked.append(list(requests))
        said = next(self.script)
        if said is None:
            raise KeyboardInterrupt
        assert len(said) == len(requests), "the script does not fit what is asked"
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in said]
