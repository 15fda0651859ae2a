"""Schemas of requests of the OpenAI API, and the reasons for unsupported fields.

An unknown field is refused by name. An unsupported field is accepted with its neutral value alone (`tools` empty,
`echo` false), and refused with its reason in `UNSUPPORTED` otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.config import (
    MAX_ADDITIVE_PENALTY,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_TOP_LOGPROBS,
    SEED_LIMIT,
    DecodingMode,
    DriverName,
    OnCloudLoss,
    OnLoop,
    Privacy,
    Scope,
)

MODEL: Final = "outrider"  # the one model name
MAX_WORD_CHARS = 256  # characters of a gate, an acceptance rule, a network
MAX_STOPS = 16
MAX_KEYS = 256  # of one object, because each invalid key costs an error of its own
MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TOOLS = 128
MAX_CHOICES = 20  # OpenAI's limit of best_of
MAX_PROMPTS = 128  # in one request, and generations of all of them together
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
AudioFormat = Literal["wav", "mp3", "flac", "ogg", "opus", "aiff", "m4a", "mp4", "3gp", "webm", "aac", "amr", "wma"]

_FUNCTIONS = "deprecated by OpenAI: use tools, tool_choice and messages of the role tool"
UNSUPPORTED: Final[dict[str, str]] = {
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "modalities": "only text: the models have no audio output",
    "audio": "the models have no audio output",
    "prediction": "the drafter is the only source of drafts",
    "verbosity": "describe it in the prompt, or for captions set outrider.task to default, detailed or concise",
    "web_search_options": "there is no web search",
    "moderation": "there is no moderation",
    "service_tier": "there is one tier: auto or default",
    "suffix": "the models continue a text, and cannot fill in its middle",
    "name": "chat templates have roles but no names: write the name into the content",
    "prompt_cache_options": "KV caches have no options: use outrider.cache_salt to separate requests",
    "prompt_cache_retention": "the gateway evicts the least recently used KV caches",
}
IGNORED: Final[dict[str, str]] = {  # fields without effect on the answer: accepted, and named in its warnings
    "user": "the gateway stores nothing about users",
    "safety_identifier": "the gateway stores nothing about users",
    "metadata": "the gateway stores nothing",
    "store": "the gateway stores nothing",
    "prompt_cache_key": "use outrider.cache_salt to separate KV caches",
    "reasoning_effort": "the models have no reasoning apart from their answer",
}


def _limit_keys(value: object) -> object:
    """Refuse an object with many keys before they are validated one by one."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise PydanticCustomError("refused", "an object of over {most} keys, the limit", {"most": MAX_KEYS})
    return value


class StrictModel(BaseModel):
    """Base of all objects of a request: no unknown fields, no type conversions, no infinities.

    reasons: why fields are not supported. The messages are those for an unknown type of a part or of an input item, for
    an unknown role, and for an invalid `tool_choice`.
    """

    reasons: ClassVar[Mapping[str, str]] = UNSUPPORTED
    parts_message: ClassVar[str] = "expected a part of type text or input_audio"
    items_message: ClassVar[str] = parts_message
    roles_message: ClassVar[str] = "expected the role system, developer, user, assistant or tool"
    tool_choice_message: ClassVar[str] = (
        'expected none, auto, required, or {"type": "function", "function": {"name": …}}'
    )

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def limit_keys(cls, value: object) -> object:
        """Refuse an object with too many keys."""
        return _limit_keys(value)


def _ignored(name: str) -> Any:
    """Return the field declaration of a field that is accepted and not used."""
    return Field(default=None, description=f"not used: {IGNORED[name]}")


def _unsupported(name: str) -> object:
    """Return the field declaration of an unsupported field."""
    return Field(description=UNSUPPORTED[name])


def _from_answer(reason: str) -> Any:
    """Return the field declaration of a field that clients send back with an earlier answer."""
    return Field(default=None, description=f"not used: {reason}")


def _check_bool(value: object) -> object:
    """Refuse other types than bool: pydantic's Literal[False] accepts 0."""
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "expected false")
    return value


LIMITED_KEYS: Final = BeforeValidator(_limit_keys)
False_ = Annotated[Literal[False], BeforeValidator(_check_bool)]
NoItems = Annotated[list[None], Field(max_length=0, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-MAX_ADDITIVE_PENALTY, le=MAX_ADDITIVE_PENALTY)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
TopLogprobsCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Word = Annotated[str, Field(max_length=MAX_WORD_CHARS)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Positive = Annotated[int, Field(ge=1, le=2**31)]
BlockLength = Annotated[int, Field(ge=1, le=64)] | Literal["auto"]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Stop = Annotated[str, Field(max_length=1000)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]


class OutriderOptions(StrictModel):
    """Options that OpenAI's API has no fields for. The defaults are those of the gateway's command line."""

    way: DecodingMode | None = Field(default=None, description="speculative, edge-only, or cloud-only")
    gate: Word | None = Field(
        default=None, description="which blocks are verified: always, never, entropy:1.5, trigger:…"
    )
    k: BlockLength | None = Field(default=None, description="tokens per block, or auto")
    accept: Word | None = Field(default=None, description="exact, residual, rank:N, margin:D or typical:E")
    scope: Scope | None = None
    on_loop: OnLoop | None = None
    driver: DriverName | None = None
    on_cloud_loss: OnCloudLoss | None = None
    privacy: Privacy | None = Field(default=None, description="the most that leaves the edge")
    net: Word | None = Field(default=None, description="an emulated network: none, rtt=50ms,bw=2Mbit, or cut")
    provisional: bool | None = Field(default=None, description="report drafted tokens too, before their verdict")
    tokens: bool | None = Field(default=None, description="report each token, and its source")
    cache_salt: Word | None = Field(
        default=None, description="only requests of one client with the same salt share KV caches"
    )
    task: Literal["default", "detailed", "concise"] | None = Field(
        default=None, description="the caption task of a recording"
    )
    lang: Literal["en", "zh"] | None = Field(default=None, description="the caption's language")
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repetition_window: Count | None = Field(default=None, description="last tokens that the penalty covers, 0 for all")
    no_repeat_ngram_size: Count | None = None
    sentences: Positive | None = Field(default=None, description="end after so many complete sentences")
    min_new_tokens: Count | None = None
    ignore_eos: bool | None = None
    grammar: GrammarText | None = Field(default=None, description="a context-free grammar in llguidance's Lark")
    regex: GrammarText | None = Field(default=None, description="a regular expression that the whole answer must match")


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = Field(default=None, description="a last chunk with the usage")
    include_obfuscation: bool | None = Field(default=None, description="not used: chunks are not padded")


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A JSON schema that every complete answer matches."""

    name: Word
    description: str | None = Field(default=None, description="not used: describe the answer in the prompt")
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(
        default=None, description="refuse unknown keywords of the schema; answers are always strict"
    )


class JsonSchemaFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Request(StrictModel):
    """Fields of both kinds of completion."""

    # Not a Literal: another name is answered with 404, as OpenAI's clients expect, and not with 400.
    model: str = Field(description="the one of GET /v1/models", json_schema_extra={"enum": [MODEL]})
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0)] | None = Field(default=None, description="0, greedy, by default")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_LIMIT)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    n: Choices | None = Field(default=None, description="choices, whose seeds are the request's plus their index")
    frequency_penalty: Penalty | None = Field(default=None, description="times a token's occurrences in the output")
    presence_penalty: Penalty | None = Field(default=None, description="for each token of the output")
    logit_bias: Annotated[dict[TokenKey, Bias], LIMITED_KEYS] | None = Field(
        default=None, description="token id to the number that is added to its logit"
    )
    user: Word | None = _ignored("user")
    outrider: OutriderOptions | None = None


class TextPart(StrictModel):
    """A text in a message."""

    type: Literal["text"]
    text: str


class InputAudio(StrictModel):
    """An audio file."""

    data: str = Field(description="the file, in base64")
    format: AudioFormat


class AudioPart(StrictModel):
    """A recording in a message."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | AudioPart, Field(discriminator="type")]


class CalledFunction(StrictModel):
    """A function and the arguments of a call. arguments: a JSON object, as text."""

    name: FunctionName
    arguments: str
    parsed_arguments: Any = _from_answer("the Python client's stream helper adds it to calls that it sends back")


class ToolCall(StrictModel):
    """A tool call in an earlier message of the assistant."""

    id: Word
    type: Literal["function"]
    function: CalledFunction
    index: Count | None = _from_answer("clients keep it from the deltas of a stream")


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schema of other values than objects. The arguments of a call are one."""
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("refused", "expected a schema of the type object, as arguments are an object")
    return schema


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], LIMITED_KEYS, AfterValidator(_check_parameters)] | None = Field(
        default=None, description="the JSON schema of its arguments"
    )
    strict: bool | None = Field(default=None, description="arguments are enforced if tool_choice is not auto")


class Tool(StrictModel):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition

    def definition(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        given = self.function
        description = {} if given.description is None else {"description": given.description}
        no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
        parameters = {"type": "object", **given.parameters} if given.parameters else no_arguments
        return {"type": "function", "function": {"name": given.name, **description, "parameters": parameters}}


class ChosenFunction(StrictModel):
    """The name of a function."""

    name: FunctionName


class NamedToolChoice(StrictModel):
    """The choice of one function, which the answer must call."""

    type: Literal["function"]
    function: ChosenFunction


class Message(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None = Field(
        default=None, description="may be missing only if there are tool_calls"
    )
    name: Annotated[None, _unsupported("name")] = None
    refusal: None = None
    audio: Annotated[None, _unsupported("audio")] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Word | None = Field(default=None, description="the call whose result a message of the role tool is")
    function_call: Annotated[None, _unsupported("function_call")] = None
    annotations: NoItems | None = None
    parsed: Any = _from_answer("the Python client's stream helper adds it to an answer")


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = Field(default=None, description="report each token's log-probability")
    top_logprobs: TopLogprobsCount | None = Field(
        default=None, description="with logprobs: the number of most probable tokens to report at each position"
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call in an answer")
    functions: Annotated[NoItems | None, _unsupported("functions")] = None
    function_call: Annotated[Literal["none", "auto"] | None, _unsupported("function_call")] = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None, _unsupported("modalities")
    ] = None
    audio: Annotated[None, _unsupported("audio")] = None
    prediction: Annotated[None, _unsupported("prediction")] = None
    reasoning_effort: Effort | None = _ignored("reasoning_effort")
    verbosity: Annotated[Literal["medium"] | None, _unsupported("verbosity")] = None
    web_search_options: Annotated[None, _unsupported("web_search_options")] = None
    moderation: Annotated[None, _unsupported("moderation")] = None
    store: bool | None = _ignored("store")
    service_tier: Annotated[Literal["auto", "default"] | None, _unsupported("service_tier")] = None
    prompt_cache_options: Annotated[None, _unsupported("prompt_cache_options")] = None
    prompt_cache_retention: Annotated[None, _unsupported("prompt_cache_retention")] = None
    safety_identifier: Word | None = _ignored("safety_identifier")
    prompt_cache_key: Word | None = _ignored("prompt_cache_key")
    metadata: Annotated[dict[Word, str], LIMITED_KEYS] | None = _ignored("metadata")
