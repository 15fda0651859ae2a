"""What is answered, as models for the OpenAPI document. Bodies are written by hand (response_building.py); tests
compare."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from outrider.decoding.result import Guarantee, Risk, Stats
from outrider.decoding.stopping import FinishReason
from outrider.gateway.decoder_pool import RequestOptions
from outrider.sampling.sampler import Signals


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Failure(Reply):
    """param: the field that is to blame. code: a word for the reason."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "cloud_error", "server_error"]
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: Failure


class TokenReport(Reply):
    """What became of one token. A revised token voids every token behind it."""

    kind: Literal["provisional", "confirmed", "revised"]
    index: int
    id: int
    text: str
    source: Literal["edge", "sampled", "accepted", "correction", "bonus"]
    signals: Signals | None


class Outcome(Reply):
    """What the answer is worth, and what it rests on. Seconds are on the gateway's clock."""

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


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplyMessage(Reply):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Reply):
    index: Literal[0]
    message: ReplyMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class TextChoice(Reply):
    index: Literal[0]
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    outrider: Outcome


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    outrider: Outcome


class Model(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Reply):
    object: Literal["list"]
    data: list[Model]


class Cut(Reply):
    cut: Literal[True]


class Health(Reply):
    """status: degraded while the cloud is unreachable, with the reason."""

    status: Literal["ok", "degraded"]
    reason: str | None
    active: int
    waiting: int
    cloud: str


class Overview(Reply):
    """The gateway's description. text: False for a model that only takes recordings.

    defaults: of the `outrider` field. networks: whether outrider.net can be set. cut: whether it can be `cut`.
    """

    edge: str
    cloud: str
    defaults: RequestOptions
    settings: dict[str, Any]
    audio: bool
    text: bool
    networks: bool
    cut: bool
    slots: int
    signals: list[str]
    version: str


class Clip(Reply):
    """A bundled recording. said: what is spoken in it."""

    name: str
    lang: Literal["en", "zh"]
    seconds: float
    url: str
    said: str
