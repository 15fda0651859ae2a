"""What a serving engine of someone else's must be able to say, and the contract of those who speak with one.

A verdict on k drafts needs the rows behind the last token before them and behind each of them. How a request for them
looks, and where in the answer they stand, is a `Dialect`'s business; sessions, replicas and retries are all the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.core.partial import PartialRow
from outrider.errors import CloudRefused, OutriderError, PromptError
from outrider.verifiers.measure import DRAFTS, PROBED, PROMPT, compare, is_normalised
from outrider.verifiers.refusals import Again
from outrider.wire.web import Json, Reply, Web

WHOLE = -1  # as a number of entries: all of a row's
PASSING = (408, 425, 429, 500, 502, 503, 504)
ELSEWHERE = (404, 405, 501)  # what a web server says of a path that it does not know
PATIENT = 300.0  # s; the first requests of a server may compile what they need


class Reread(Exception):
    """The rows that were asked for lay in the server's prefix cache: ask again, without it."""


class MediaMissing(Exception):
    """The server has forgotten the recording: ask again, with it."""


@dataclass(frozen=True)
class Media:
    """A recording in a prompt. uuid: its name for the server. url: a data URI of it; None once the server has it.

    placeholder: its token; the first `until` ids are the prompt, where each run of it stands for a recording.
    """

    uuid: str
    url: str | None
    placeholder: int
    until: int


@dataclass(frozen=True)
class Ask:
    """The rows behind each of the last `rows` of `ids`, the best `top` entries of each (or WHOLE).

    session: what requests that continue each other share. fresh: do not rely on what is cached. ends: the tokens at
    which an output may end; a server that ends at another is refused (None: not looked at).
    """

    ids: Sequence[int]
    rows: int
    top: int
    session: str
    fresh: bool = False
    media: Media | None = None
    ends: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Abilities:
    """What a server was found to be and to do, by asking it.

    model: what it serves. max_length: positions of a sequence that it can judge. way: how it is asked, as the dialect
    knows it. top: most entries of a row that it sends; WHOLE for all. normalised: rows are log-probabilities, not
    logits. noise: logits; by how much two ways to the same row may differ, doubled. sample: rows of a fixed prompt.
    caution: what the way that it is asked costs, for whoever goes it; empty where there is nothing to say.
    """

    model: str
    max_length: int | None
    way: str
    top: int
    normalised: bool
    noise: float
    sample: tuple[PartialRow, ...]
    caution: str = ""


class Dialect(Protocol):
    """How one kind of server is spoken with. scheme: as in "vllm://host:port". product: whose API it is.

    logits, more: how to start it so that rows are logits, or so that it sends n entries of a row ("{}" stands for n).
    """

    scheme: str
    product: str
    logits: str
    more: str

    async def probe(self, web: Web) -> Abilities:
        """Find out what the server can do, and prove it on a known prompt."""
        ...

    def request(self, ask: Ask, able: Abilities) -> tuple[str, Json]:
        """Path and body."""
        ...

    def rows(self, content: Json, ask: Ask, able: Abilities) -> list[PartialRow]:
        """The rows in the answer.

        Raises:
            Reread: they are not there.
            CloudRefused: the answer is none to this request.
        """
        ...

    def failure(self, name: str, reply: Reply) -> Exception:
        """What an answer other than 200 means."""
        ...

    async def text(self, web: Web, able: Abilities, ids: Sequence[int]) -> str:
        """The text of tokens, as the server's tokenizer decodes them, special ones included."""
        ...

    async def ends(self, web: Web, able: Abilities, token: int) -> bool:
        """Whether the server ends an output at this token."""
        ...


def check_end(ask: Ask, token: int, *, ended: bool) -> None:
    """Raise CloudRefused where the server ended its output at a token that we know as no end."""
    if ended and ask.ends is not None and token not in ask.ends:
        raise CloudRefused(f"the server ends its output at token {token}, which the drafter does not know as an end")


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Within: an answer is taken apart, and one of another form is refused."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CloudRefused(f"{name}: the answer cannot be read ({type(error).__name__}: {error})") from error


def failure(name: str, reply: Reply) -> Exception:
    """What an answer other than 200 means wherever it comes from."""
    if reply.status in PASSING:
        return Again(f"{name}: {reply.reason}", reply.after, busy=reply.status == 429)
    if reply.status in (401, 403):
        return CloudRefused(f"{name} refused: {reply.error.rstrip('.')}; {_identity(reply)}")
    kind: type[OutriderError] = PromptError if "context length" in reply.error else CloudRefused
    return kind(f"{name}: {reply.reason}")


def _identity(reply: Reply) -> str:
    """What a refusal of who we are may be about."""
    if not reply.identified:
        return "it may want a token"
    return "the token given is not accepted" if reply.status == 401 else "the token given may not be enough"


async def told_of_itself(dialect: Dialect, web: Web, path: str) -> Json:
    """What the server answers to the first questions, which every server of its kind knows.

    Raises:
        CloudRefused: it does not know them.
    """
    reply = await web.get(path)
    if reply.status in ELSEWHERE:
        raise CloudRefused(f"{web.name}: nobody there speaks {dialect.product}'s API (GET {path}: HTTP {reply.status})")
    if reply.status != 200:
        raise dialect.failure(web.name, reply)
    return reply.content


async def told(dialect: Dialect, web: Web, path: str, body: Json, seconds: float = PATIENT) -> Json:
    """What the server answers to a request outside of any session."""
    reply = await web.post(path, body, seconds)
    if reply.status != 200:
        raise dialect.failure(web.name, reply)
    return reply.content


async def asked(dialect: Dialect, web: Web, ask: Ask, able: Abilities, seconds: float = PATIENT) -> list[PartialRow]:
    """The rows that `told` answers with."""
    return dialect.rows(await told(dialect, web, *dialect.request(ask, able), seconds), ask, able)


def known(*, fresh: bool = False) -> Ask:
    """The rows of the known prompt and its drafts, in a session of their own."""
    return Ask((*PROMPT, *DRAFTS), len(DRAFTS) + 1, PROBED, uuid.uuid4().hex, fresh)


def proven(name: str, able: Abilities, read: Sequence[PartialRow], again: Sequence[PartialRow]) -> Abilities:
    """What two readings of the known prompt's rows tell.

    Raises:
        CloudRefused: they are not readings of the same rows.
    """
    return replace(able, normalised=is_normalised(read), noise=compare(name, read, again), sample=tuple(read))
