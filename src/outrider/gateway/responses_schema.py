"""Schemas of `POST /v1/responses`, and the reasons for its unsupported fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag

from outrider.config import SEED_LIMIT
from outrider.gateway.request_schema import (
    LIMITED_KEYS,
    MAX_KEYS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MODEL,
    Effort,
    False_,
    FunctionName,
    InputAudio,
    JsonObjectFormat,
    JsonSchema,
    NoItems,
    OutriderOptions,
    Positive,
    StrictModel,
    TextFormat,
    Word,
)

_STATELESS: Final = "the gateway stores nothing: send the whole history as input"
RESPONSES_UNSUPPORTED: Final[dict[str, str]] = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "store": "the gateway stores nothing: leave it out or send false",
    "background": "a generation ends with its connection: stream it",
    "prompt": "there are no stored prompts: send instructions and input",
    "context_management": "prompts are not shortened",
    "truncation": "prompts are not shortened: only disabled",
    "include": "there is nothing to include",
    "max_tool_calls": "there are no built-in tools",
    "top_logprobs": "only chat completions and completions report log-probabilities",
    "service_tier": "there is one tier: auto or default",
    "prompt_cache_options": "KV caches have no options: use outrider.cache_salt to separate requests",
    "prompt_cache_retention": "the gateway evicts the least recently used KV caches",
    "moderation": "there is no moderation",
}


def _refused(name: str) -> Any:
    """Return the field declaration of a field that is accepted with its neutral value alone."""
    return Field(default=None, description=RESPONSES_UNSUPPORTED[name])


class InputText(StrictModel):
    """A text in an item."""

    type: Literal["input_text"]
    text: str


class OutputText(StrictModel):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: NoItems | None = None
    logprobs: NoItems | None = None


class InputAudioPart(StrictModel):
    """A recording in an item."""

    type: Literal["input_audio"]
    input_audio: InputAudio


InputPart = Annotated[InputText | OutputText | InputAudioPart, Field(discriminator="type")]
Parts = Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
Texts = Annotated[list[InputText], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(StrictModel):
    """A message. id, status, phase: of an earlier answer, not used."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    id: Word | None = None
    status: Status | None = None
    phase: Word | None = None


class FunctionCallItem(StrictModel):
    """A tool call in an earlier answer."""

    type: Literal["function_call"]
    call_id: Word
    name: FunctionName
    arguments: str
    id: Word | None = None
    status: Status | None = None


class FunctionResultItem(StrictModel):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: Word
    output: str | Texts
    id: Word | None = None
    status: Status | None = None


def _item_kind(value: object) -> str:
    """Return an item's type. Messages may omit it."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind or "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionResultItem, Tag("function_call_output")],
    Discriminator(_item_kind),
]


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], LIMITED_KEYS] | None = None
    strict: bool | None = None


class ToolName(StrictModel):
    """The choice of one function."""

    type: Literal["function"]
    name: FunctionName


class JsonSchemaText(JsonSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


class TextOptions(StrictModel):
    """Options of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(StrictModel):
    """Options of reasoning, not used: the models have no reasoning apart from their answer."""

    effort: Effort | None = None
    summary: Word | None = None
    generate_summary: Word | None = None


class ResponseStreamOptions(StrictModel):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(default=None, description="not used: events are not padded")


class ResponsesRequest(StrictModel):
    """`POST /v1/responses`."""

    reasons: ClassVar[Mapping[str, str]] = RESPONSES_UNSUPPORTED
    parts_message: ClassVar[str] = "expected a part of type input_text, output_text or input_audio"
    items_message: ClassVar[str] = "expected an item of type message, function_call or function_call_output"
    roles_message: ClassVar[str] = "expected the role system, developer, user or assistant"
    tool_choice_message: ClassVar[str] = 'expected none, auto, required, or {"type": "function", "name": …}'

    model: str = Field(description="the one of GET /v1/models", json_schema_extra={"enum": [MODEL]})
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0)] | None = Field(default=None, description="0, greedy, by default")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_LIMIT)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[Word, str], Field(max_length=MAX_KEYS), LIMITED_KEYS] | None = None
    user: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    outrider: OutriderOptions | None = None
    store: False_ | None = _refused("store")
    background: False_ | None = _refused("background")
    truncation: Literal["disabled"] | None = _refused("truncation")
    include: NoItems | None = _refused("include")
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = _refused("top_logprobs")
    service_tier: Literal["auto", "default"] | None = _refused("service_tier")
    previous_response_id: None = _refused("previous_response_id")
    conversation: None = _refused("conversation")
    prompt: None = _refused("prompt")
    context_management: NoItems | None = _refused("context_management")
    max_tool_calls: None = _refused("max_tool_calls")
    moderation: None = _refused("moderation")
    prompt_cache_options: None = _refused("prompt_cache_options")
    prompt_cache_retention: None = _refused("prompt_cache_retention")
