"""What a serving engine of someone else's must be able to say, and the contract of those who speak with one.

A verdict on k drafts needs the rows behind the last token before them and behind each of them. How a request for them
looks, and where in the answer they stand, is a `Backend`'s business; sessions, replicas and retries are all the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.errors import CloudRefused, OutriderError, PromptError
from outrider.sampling.top_logprobs import TopLogprobs
from outrider.transport.http_client import HttpClient, HttpResponse, Json
from outrider.verifiers.llm_server.logit_noise import (
    PROBE_DRAFTS,
    PROBE_PROMPT,
    PROBE_TOP,
    is_normalised,
    measure_noise,
)
from outrider.verifiers.retry import Retryable

ALL_LOGPROBS = -1  # as a number of entries: all of a row's
RETRYABLE_STATUSES = (408, 425, 429, 500, 502, 503, 504)
UNKNOWN_PATH_STATUSES = (404, 405, 501)  # what a web server says of a path that it does not know
PROBE_TIMEOUT = 300.0  # s; the first requests of a server may compile what they need


class CachedLogprobsMissing(Exception):
    """The rows that were asked for lay in the server's prefix cache: ask again, without it."""


class MediaMissing(Exception):
    """The server has forgotten the recording: ask again, with it."""


@dataclass(frozen=True)
class Media:
    """A recording in a prompt. uuid: its name for the server. url: a data URI of it; None once the server has it.

    placeholder: its token; the first `prompt_length` ids are the prompt, where each run of it stands for a recording.
    """

    uuid: str
    url: str | None
    placeholder: int
    prompt_length: int


@dataclass(frozen=True)
class LogprobsRequest:
    """The rows behind each of the last `rows` of `ids`, the best `top` entries of each (or ALL_LOGPROBS).

    session: what requests that continue each other share. skip_cache: do not rely on what is cached. eos_ids: the
    tokens at which an output may end; a server that ends at another is refused (None: not looked at).
    """

    ids: Sequence[int]
    rows: int
    top: int
    session: str
    skip_cache: bool = False
    media: Media | None = None
    eos_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a server was found to be and to do, by asking it.

    model: what it serves. max_length: positions of a sequence that it can judge. mode: how it is asked, as the backend
    knows it. top: most entries of a row that it sends; ALL_LOGPROBS for all. normalised: rows are log-probabilities,
    not logits. noise: logits; by how much two ways to the same row may differ, doubled. sample: rows of a fixed prompt.
    warning: what the way that it is asked costs, for whoever goes it; empty where there is nothing to say.
    """

    model: str
    max_length: int | None
    mode: str
    top: int
    normalised: bool
    noise: float
    sample: tuple[TopLogprobs, ...]
    warning: str = ""


class Backend(Protocol):
    """How one kind of server is spoken with. scheme: as in "vllm://host:port". product: whose API it is.

    logits_hint, more_hint: how to start it so that rows are logits, or so that it sends n entries of a row ("{}" stands
    for n).
    """

    scheme: str
    product: str
    logits_hint: str
    more_hint: str

    async def probe(self, client: HttpClient) -> Capabilities:
        """Find out what the server can do, and prove it on a known prompt."""
        ...

    def build_request(self, request: LogprobsRequest, capabilities: Capabilities) -> tuple[str, Json]:
        """Path and body."""
        ...

    def parse_logprobs(self, content: Json, request: LogprobsRequest, capabilities: Capabilities) -> list[TopLogprobs]:
        """The rows in the answer.

        Raises:
            CachedLogprobsMissing: they are not there.
            CloudRefused: the answer is none to this request.
        """
        ...

    def map_error(self, name: str, reply: HttpResponse) -> Exception:
        """What an answer other than 200 means."""
        ...

    async def detokenize(self, client: HttpClient, capabilities: Capabilities, ids: Sequence[int]) -> str:
        """The text of tokens, as the server's tokenizer decodes them, special ones included."""
        ...

    async def is_eos(self, client: HttpClient, capabilities: Capabilities, token: int) -> bool:
        """Whether the server ends an output at this token."""
        ...


def check_eos(request: LogprobsRequest, token: int, *, ended: bool) -> None:
    """Raise CloudRefused where the server ended its output at a token that we know as no end."""
    if ended and request.eos_ids is not None and token not in request.eos_ids:
        raise CloudRefused(f"the server ends its output at token {token}, which the drafter does not know as an end")


@contextmanager
def parse_errors(name: str) -> Iterator[None]:
    """Within: an answer is taken apart, and one of another form is refused."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CloudRefused(f"{name}: the answer cannot be read ({type(error).__name__}: {error})") from error


def map_error(name: str, reply: HttpResponse) -> Exception:
    """What an answer other than 200 means wherever it comes from."""
    if reply.status in RETRYABLE_STATUSES:
        return Retryable(f"{name}: {reply.reason}", reply.retry_after, is_busy=reply.status == 429)
    if reply.status in (401, 403):
        return CloudRefused(f"{name} refused: {reply.error.rstrip('.')}; {_token_hint(reply)}")
    kind: type[OutriderError] = PromptError if "context length" in reply.error else CloudRefused
    return kind(f"{name}: {reply.reason}")


def _token_hint(reply: HttpResponse) -> str:
    """What a refusal of who we are may be about."""
    if not reply.has_token:
        return "it may want a token"
    return "the token given is not accepted" if reply.status == 401 else "the token given may not be enough"


async def get_info(backend: Backend, client: HttpClient, path: str) -> Json:
    """What the server answers to the first questions, which every server of its kind knows.

    Raises:
        CloudRefused: it does not know them.
    """
    reply = await client.get(path)
    if reply.status in UNKNOWN_PATH_STATUSES:
        raise CloudRefused(
            f"{client.name}: nobody there speaks {backend.product}'s API (GET {path}: HTTP {reply.status})"
        )
    if reply.status != 200:
        raise backend.map_error(client.name, reply)
    return reply.content


async def post_json(
    backend: Backend, client: HttpClient, path: str, body: Json, seconds: float = PROBE_TIMEOUT
) -> Json:
    """What the server answers to a request outside of any session."""
    reply = await client.post(path, body, seconds)
    if reply.status != 200:
        raise backend.map_error(client.name, reply)
    return reply.content


async def fetch_logprobs(
    backend: Backend,
    client: HttpClient,
    request: LogprobsRequest,
    capabilities: Capabilities,
    seconds: float = PROBE_TIMEOUT,
) -> list[TopLogprobs]:
    """The rows that `post_json` answers with."""
    return backend.parse_logprobs(
        await post_json(backend, client, *backend.build_request(request, capabilities), seconds), request, capabilities
    )


def probe_request(*, skip_cache: bool = False) -> LogprobsRequest:
    """The rows of the known prompt and its drafts, in a session of their own."""
    return LogprobsRequest(
        (*PROBE_PROMPT, *PROBE_DRAFTS), len(PROBE_DRAFTS) + 1, PROBE_TOP, uuid.uuid4().hex, skip_cache
    )


def with_noise(
    name: str, capabilities: Capabilities, read: Sequence[TopLogprobs], again: Sequence[TopLogprobs]
) -> Capabilities:
    """What two readings of the known prompt's rows tell.

    Raises:
        CloudRefused: they are not readings of the same rows.
    """
    return replace(
        capabilities, normalised=is_normalised(read), noise=measure_noise(name, read, again), sample=tuple(read)
    )
