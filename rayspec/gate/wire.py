"""What the gate reads of an OpenAI-compatible server's answers. Fields that it does not need are ignored. Those
that it needs must have the right type, since a server that says anything else cannot be measured."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MAX_COUNT = 10**9  # of tokens or steps; a larger one is a mistake of who sends it
Counted = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Delta(_Message):
    content: str | None = None
    reasoning_content: str | None = None  # SGLang's, and vLLM's of before
    reasoning: str | None = None  # vLLM's


class Choice(_Message):
    text: str | None = None  # of /completions
    delta: Delta | None = None  # of /chat/completions


class Usage(_Message):
    prompt_tokens: Counted | None = None
    completion_tokens: Counted | None = None


class SpecDetails(_Message):
    spec_verify_ct: Counted = 0
    spec_num_correct_drafts: Counted = 0


class Extension(_Message):
    """SGLang's."""

    spec_tokens_details: SpecDetails | None = None


class Chunk(_Message):
    """An event of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    sglext: Extension | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """Reasoning is output too."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        delta = choice.delta or Delta()
        return choice.text or delta.content or delta.reasoning_content or delta.reasoning or ""


class ListedModel(_Message):
    id: str
    root: str | None = None
    owned_by: str | None = None


class ModelList(_Message):
    data: list[ListedModel]


class ServerInfo(_Message):
    """Part of SGLang's /server_info: its own flag, and the file of one of its rules or of a policy of ours."""

    speculative_adaptive: bool = False
    speculative_adaptive_config: str | None = None
