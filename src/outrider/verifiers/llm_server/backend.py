"""The interface to an LLM server (vLLM, SGLang): requests for log-probabilities and a probe of the capabilities.

A verdict on k drafts needs k+1 rows of log-probabilities or logits: one after the last committed token and one after
each draft. A `Backend` builds the request for them and parses the answer of one kind of server. Sessions, replicas and
retries are common to all.
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

ALL_LOGPROBS = -1  # as a number of entries: the whole row
RETRYABLE_STATUSES = (408, 425, 429, 500, 502, 503, 504)
UNKNOWN_PATH_STATUSES = (404, 405, 501)
PROBE_TIMEOUT = 300.0  # s; the first requests to a server may trigger compilation


class CachedLogprobsMissing(Exception):
    """The server cannot return rows of tokens in its prefix cache. Repeat the request with skip_cache."""


class MediaMissing(Exception):
    """The server no longer has the recording. Repeat the request with its data."""


@dataclass(frozen=True)
class Media:
    """A recording in a prompt.

    uuid: its key in the server's media cache. url: its data URI, None once the server has it. placeholder: each run of
    this token among the first `prompt_length` ids stands for a recording.
    """

    uuid: str
    url: str | None
    placeholder: int
    prompt_length: int


@dataclass(frozen=True)
class LogprobsRequest:
    """A request for the rows after each of the last `rows` of `ids`, with the `top` best entries (or ALL_LOGPROBS).

    session: key shared by the requests of one sequence. skip_cache: bypass the prefix cache. eos_ids: the tokens at
    which the server may end its output, None to skip this check.
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
    """The capabilities of a server, found by probing it.

    model: the served model. max_length: most positions of a sequence. mode: the backend's request mode. top: most
    entries of a row, ALL_LOGPROBS without a limit. normalised: rows are log-probabilities, not logits. noise: twice the
    measured difference between two computations of the same row, in logits. sample: rows of the probe prompt. warning:
    the cost of the request mode, for the log, or empty. media_refusal: the reason that recordings cannot be verified,
    or empty. sends_computed_rows: the answer has the rows of all computed tokens, not of the requested ones alone.
    """

    model: str
    max_length: int | None
    mode: str
    top: int
    normalised: bool
    noise: float
    sample: tuple[TopLogprobs, ...]
    warning: str = ""
    media_refusal: str = ""
    sends_computed_rows: bool = False


class Backend(Protocol):
    """The requests and answers of one kind of server.

    scheme: as in "vllm://host:port". product: name of the server software. logits_hint: advice on how to get logits.
    """

    scheme: str
    product: str
    logits_hint: str

    def more_hint(self, capabilities: Capabilities, count: int) -> str:
        """Return advice on how to get `count` entries of a row (ALL_LOGPROBS for the whole row)."""
        ...

    async def read_model(self, client: HttpClient) -> tuple[str, int | None]:
        """Return the name of the served model, and the most positions of a sequence (None without a limit)."""
        ...

    async def probe(self, client: HttpClient) -> Capabilities:
        """Determine the server's capabilities with requests for the probe prompt."""
        ...

    def build_request(self, request: LogprobsRequest, capabilities: Capabilities) -> tuple[str, Json]:
        """Return path and body of the HTTP request."""
        ...

    def parse_logprobs(self, content: Json, request: LogprobsRequest, capabilities: Capabilities) -> list[TopLogprobs]:
        """Return the rows in the answer.

        Raises:
            CachedLogprobsMissing: the answer lacks rows of cached tokens.
            CloudRefused: the answer does not fit the request.
        """
        ...

    def map_error(self, name: str, reply: HttpResponse) -> Exception:
        """Return the exception for a status other than 200."""
        ...

    async def detokenize(self, client: HttpClient, capabilities: Capabilities, ids: Sequence[int]) -> str:
        """Decode ids with the server's tokenizer, special tokens included."""
        ...

    async def is_eos(self, client: HttpClient, capabilities: Capabilities, token: int) -> bool:
        """Return whether the server ends its output at this token."""
        ...


def check_eos(request: LogprobsRequest, token: int, *, ended: bool) -> None:
    """Raise CloudRefused if the server ended its output at a token outside request.eos_ids."""
    if ended and request.eos_ids is not None and token not in request.eos_ids:
        raise CloudRefused(f"the server ends its output at token {token}, which the drafter does not know as an end")


@contextmanager
def parse_errors(name: str) -> Iterator[None]:
    """Turn the errors of parsing an answer into CloudRefused."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CloudRefused(f"{name}: the answer cannot be read ({type(error).__name__}: {error})") from error


def map_error(name: str, reply: HttpResponse) -> Exception:
    """Return the exception for a status other than 200, as far as it is common to all servers."""
    if reply.status in RETRYABLE_STATUSES:
        return Retryable(f"{name}: {reply.reason}", reply.retry_after, is_busy=reply.status == 429)
    if reply.status in (401, 403):
        hint = "the token given is not accepted" if reply.status == 401 else "the token given may not be enough"
        hint = hint if reply.has_token else "it may want a token"
        return CloudRefused(f"{name} refused: {reply.error.rstrip('.')}; {hint}")
    kind: type[OutriderError] = PromptError if "context length" in reply.error else CloudRefused
    return kind(f"{name}: {reply.reason}")


async def get_info(backend: Backend, client: HttpClient, path: str) -> Json:
    """Return the answer to a GET request that every server of the backend's kind supports.

    Raises:
        CloudRefused: the server does not know the path.
    """
    reply = await client.get(path)
    if reply.status in UNKNOWN_PATH_STATUSES:
        raise CloudRefused(
            f"{client.name}: the server does not offer {backend.product}'s API (GET {path}: HTTP {reply.status})"
        )
    if reply.status != 200:
        raise backend.map_error(client.name, reply)
    return reply.content


async def post_json(
    backend: Backend, client: HttpClient, path: str, body: Json, seconds: float = PROBE_TIMEOUT
) -> Json:
    """Return the answer to a POST request outside of any session."""
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
    """Return the rows of a request outside of any session."""
    path, body = backend.build_request(request, capabilities)
    answer = await post_json(backend, client, path, body, seconds)
    return backend.parse_logprobs(answer, request, capabilities)


def probe_request(*, skip_cache: bool = False) -> LogprobsRequest:
    """Return a request for the rows of the probe prompt and its drafts, under a session key of its own."""
    return LogprobsRequest(
        (*PROBE_PROMPT, *PROBE_DRAFTS), len(PROBE_DRAFTS) + 1, PROBE_TOP, uuid.uuid4().hex, skip_cache
    )


def with_noise(
    name: str, capabilities: Capabilities, read: Sequence[TopLogprobs], again: Sequence[TopLogprobs]
) -> Capabilities:
    """Return the capabilities with the noise between two computations of the probe prompt's rows.

    Raises:
        CloudRefused: the difference is too large for noise.
    """
    return replace(
        capabilities, normalised=is_normalised(read), noise=measure_noise(name, read, again), sample=tuple(read)
    )
