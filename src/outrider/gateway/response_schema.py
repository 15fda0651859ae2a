"""Schemas of answers, for the OpenAPI document. Tests compare them with the bodies of response_building.py."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from outrider.decoding.result import Guarantee, Risk, Stats
from outrider.decoding.stopping import FinishReason
from outrider.gateway.decoder_pool import RequestOptions
from outrider.gateway.errors import JsonObject
from outrider.sampling.sampler import Signals

SourceName = Literal["edge", "sampled", "accepted", "correction", "bonus"]


class Reply(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid")


class Failure(Reply):
    """An error. param: the field at fault. code: the reason, for programs."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "cloud_error", "server_error"]
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """The body of an error response."""

    error: Failure


class TokenReport(Reply):
    """An event of one token. A revised token invalidates all tokens after it."""

    kind: Literal["provisional", "confirmed", "revised"]
    index: int
    id: int
    text: str
    source: SourceName
    signals: Signals | None


class Outcome(Reply):
    """The guarantee and the statistics of an answer. Times are seconds, measured by the gateway."""

    guarantee: Guarantee
    finish_reason: FinishReason
    stats: Stats
    risk: Risk | None
    ledger: dict[str, dict[str, int]]
    near_ties: list[int]
    warnings: list[str]
    acceptance_rate: float | None
    escalation_rate: float | None
    cloud_share: float | None
    itl_s: float | None
    tokens: list[TokenReport] | None = None


class PromptTokensDetails(Reply):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int


class Usage(Reply):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ReplyFunction(Reply):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class ReplyToolCall(Reply):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: ReplyFunction


class ReplyMessage(Reply):
    """The assistant's message. content: null if there are tool calls and no text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ReplyToolCall] | None = None


class TopLogprob(Reply):
    """A token that was possible at a position. bytes: the token's, possibly a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of the answer. The log-probabilities of the sources edge and sampled are the drafter's."""

    top_logprobs: list[TopLogprob]
    source: SourceName


class ChatLogprobs(Reply):
    """The log-probabilities of an answer's tokens, the end-of-sequence token included."""

    content: list[ChatLogprob]
    refusal: None


class TextLogprobs(Reply):
    """The log-probabilities of a text's tokens. sources: as of `ChatLogprob`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    sources: list[SourceName]


class _Choice(Reply):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    outrider: Outcome | None = None


class ChatChoice(_Choice):
    """The answer in a conversation."""

    message: ReplyMessage
    logprobs: ChatLogprobs | None


class TextChoice(_Choice):
    """The continuation of a text."""

    text: str
    logprobs: TextLogprobs | None


class _Completion(Reply):
    # outrider: absent with several choices, which have one each.
    id: str
    created: int
    model: str
    usage: Usage
    outrider: Outcome | None = None


class ChatCompletion(_Completion):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Completion):
    """The answer of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ResponseText(Reply):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class ResponseMessage(Reply):
    """A message of the assistant."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[ResponseText]


class ResponseCall(Reply):
    """A tool call. arguments: JSON."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class ResponseUsage(Reply):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class Response(Reply):
    """The answer of `POST /v1/responses`. incomplete_details: the limit that truncated the output, if any."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    instructions: str | None
    max_output_tokens: int
    metadata: dict[str, str]
    output: list[ResponseMessage | ResponseCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    outrider: Outcome


class TranscriptionUsage(Reply):
    """Token counts of a transcription."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(Reply):
    """The answer of `POST /v1/audio/transcriptions`. task, language, duration: with response_format verbose_json."""

    text: str
    task: Literal["transcribe"] | None = None
    language: Literal["en", "zh"] | None = None
    duration: float | None = None
    usage: TranscriptionUsage
    outrider: Outcome


class Tokens(Reply):
    """The answer of `POST /tokenize`. max_model_len: the models' window, null if unlimited."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(Reply):
    """The answer of `POST /detokenize`."""

    prompt: str


class Model(Reply):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Reply):
    """The list of models."""

    object: Literal["list"]
    data: list[Model]


class Cut(Reply):
    """The confirmation that a request was disconnected from its cloud."""

    cut: Literal[True]


class Health(Reply):
    """The gateway's state. status: degraded while the cloud cannot be used, with the reason."""

    status: Literal["ok", "degraded"]
    reason: str | None
    active: int
    waiting: int
    cloud: str


class Overview(Reply):
    """The gateway's description. text: False for a model that only takes recordings.

    drafter: the source of drafts, "none" if the cloud decodes alone. Prompt lookup alone cannot generate without the
    cloud, and prompt lookup supports no gate, with or without a model. defaults: those of the `outrider` field, without
    the options that a gateway without an edge model or a cloud does not use. networks: whether requests may set
    outrider.net. cut: whether they may set it to `cut`.
    """

    edge: str
    cloud: str
    drafter: Literal["model", "lookup", "model+lookup", "none"]
    defaults: RequestOptions
    settings: JsonObject
    audio: bool
    text: bool
    networks: bool
    cut: bool
    slots: int
    signals: list[str]
    version: str


class Clip(Reply):
    """A bundled recording, with its transcript."""

    name: str
    lang: Literal["en", "zh"]
    seconds: float
    url: str
    said: str
