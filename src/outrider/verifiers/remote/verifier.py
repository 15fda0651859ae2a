"""The verifier for a running `outrider cloud`, with sessions that survive lost connections.

A request is retried until it is answered. The first attempt uses the session's stream. If that stream broke, the next
attempt resumes the session on a new one. If the cloud has lost the session, the attempt opens a new session with the
same tokens. The verdict is the same in all three cases because every request carries its round and base length.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from google.protobuf.message import DecodeError

from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudLost, CloudRefused, VocabularyMismatch
from outrider.protocol import schema
from outrider.protocol.tokenizer_files import MAX_PACKED, digest_of
from outrider.sampling.acceptance import Verdict
from outrider.transport.byte_counts import ByteCounts
from outrider.transport.connection import Connection
from outrider.transport.endpoint import TCP, Network
from outrider.transport.hosts import bracket_host
from outrider.transport.status import CallFailed, Disconnected
from outrider.transport.tls import ClientTls
from outrider.verifiers.base import ModelInfo, RemoteSessions, SessionParams, label_model
from outrider.verifiers.remote.errors import map_call_error
from outrider.verifiers.remote.kept_sessions import KeptSessions
from outrider.verifiers.remote.session import Peer, RemoteSession
from outrider.verifiers.remote.tokenizer_cache import read_cached, write_cached
from outrider.verifiers.retry import Retryable, retry

T = TypeVar("T")

MAX_VOCABULARY_SIZE = 2**24  # tokens; sixty times the largest known vocabulary
MAX_NAME_LENGTH = 400  # characters of a model's name, and bytes of its hash or fingerprint
CUT_RETRY_TIMEOUT = 0.3  # s


class RemoteVerifier(RemoteSessions[RemoteSession]):
    """The verifier at host:port, an `outrider cloud`.

    deadline: seconds per attempt. retry_timeout: seconds from the first failed attempt to `CloudLost`. network: makes
    the connections.

    Raises (every method that sends a request):
        CloudLost: all attempts failed.
        CloudRefused: the cloud refused the credentials or the request, and a retry would not help.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        network: Network = TCP,
        deadline: float = 30.0,
        retry_timeout: float = 10.0,
    ) -> None:
        super().__init__()
        self.name = f"grpc://{bracket_host(host)}:{port}"
        self.deadline, self.retry_timeout = deadline, retry_timeout
        self.connection = Connection(host, port, tls=tls, token=token, network=network)
        self._model_info: ModelInfo | None = None
        self._token_names: list[str] = []  # empty until the first request for them
        self._in_use = False  # sessions were opened, which must all be with one model
        self._model, self._vocab_size, self._tokenizer_digest = b"", 0, b""
        self._kept = KeptSessions()

    def disconnect(self) -> None:
        """Close all sessions and the connection."""
        for session in list(self._sessions):
            self.close(session)
        self.connection.close()

    def probe(self) -> None:
        """Check that the cloud answers, and still has the model that it described first."""
        if (first := self._model_info) is None:
            self.describe()
            return
        answer = self.connection.run(self._retry(self._fetch_description)).result()
        if (answer.model, answer.fingerprint.decode(errors="replace")) != (self._model, first.fingerprint):
            now = label_model(answer.name, answer.quantization)
            raise CloudRefused(
                f"{self.name} serves another model than at the handshake: {now} now, {first.label} then. Serve that "
                "one again, or restart the edge"
            )

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        """Return the cloud's description, which is fetched once. The cloud refuses sessions if its model changes."""
        if self._model_info is None:
            self._model_info = self.connection.run(self._retry(self._describe)).result()
        return self._model_info

    def forget_model(self) -> None:
        """Fetch the description again at the next handshake, unless there were sessions with this model."""
        if not self._in_use:
            self._model_info, self._token_names = None, []

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        """Open a session. The first request opens it in the cloud.

        Raises:
            VocabularyMismatch: the cloud described another vocabulary since the handshake of this edge.
        """
        target = self.describe()
        if params.fingerprint not in ("", target.fingerprint):
            raise VocabularyMismatch(f"{target.name} has another vocabulary than the edge compared with")
        self._in_use = True
        peer = Peer(self.name, self.connection, target.fingerprint, self._model, self.deadline, self._kept)
        return self._add(RemoteSession(peer, prompt, params))

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """Send a request and return the future of its verdict."""
        return self.connection.run(self._retry(self._get(session).verify, request))

    def generate(self, session: int) -> Iterator[Verdict]:
        """Yield the target's own tokens, one verdict for each token."""
        while True:
            yield self.next_token(session).result()

    def next_token(self, session: int) -> Future[Verdict]:
        """Return the future of the next verdict of `generate`."""
        return self.connection.run(self._retry(self._get(session).generate_next))

    def byte_counts(self, session: int) -> ByteCounts:
        """Return the session's byte counts, including all transport bytes that no session has claimed."""
        return self.connection.run(self._get(session).count_bytes()).result()

    def close(self, session: int) -> None:
        """Close the session in the cloud, without waiting for it."""
        entry = self._sessions.pop(session, None)
        if entry is not None and not self.connection.is_forked:
            self.connection.run(entry.close())

    def cut(self) -> None:
        """Break the connection and fail all further attempts, to simulate an outage."""
        self.retry_timeout = CUT_RETRY_TIMEOUT
        self.connection.run(self.connection.cut()).result()

    def _read_vocabulary(self) -> list[str]:
        """Return the token strings, which are fetched once."""
        if not self._token_names:
            self._token_names = self.connection.run(self._retry(self._vocabulary)).result()
        return self._token_names

    def _read_tokenizer(self) -> bytes:
        """Return the packed files of the tokenizer, from the user's cache or from the cloud."""
        packed = read_cached(self._tokenizer_digest)
        if packed is None:
            packed = self.connection.run(self._retry(self._tokenizer)).result()
            write_cached(packed)
        return packed

    # In the connection's loop -------------------------------------------------------------------------------

    async def _fetch_description(self) -> schema.DescribeAnswer:
        answer = await self._call(self.connection.describe(self.deadline))
        if answer.protocol != schema.VERSION:
            raise CloudRefused(f"{self.name} speaks protocol {answer.protocol}, this edge {schema.VERSION}")
        if answer.max_drafts < schema.MAX_DRAFTS:
            raise CloudRefused(f"{self.name} takes {answer.max_drafts} drafts at once, not {schema.MAX_DRAFTS}")
        problem = _find_inconsistency(answer)
        if problem:
            raise CloudRefused(f"{self.name} sent an invalid description of itself: {problem}")
        return answer

    async def _describe(self) -> ModelInfo:
        answer = await self._fetch_description()
        self._model = answer.model
        self._vocab_size, self._tokenizer_digest = answer.vocab_size, answer.tokenizer
        return ModelInfo(
            f"{answer.name} at {self.name}",
            answer.vocab_size,
            answer.row_count,
            tuple(answer.eos_ids),
            answer.fingerprint.decode(errors="replace"),
            answer.max_length or None,
            answer.audio_seconds,
            read_vocabulary=self._read_vocabulary,
            read_tokenizer=self._read_tokenizer if answer.tokenizer else None,
            captions_only=answer.captions_only,
            quantization=answer.quantization or None,
        )

    async def _vocabulary(self) -> list[str]:
        names = await self._call(self.connection.vocabulary(self._vocab_size, self.deadline))
        if len(names) > self._vocab_size:
            raise CloudRefused(f"{self.name} sent more token names than its vocab_size of {self._vocab_size}")
        return names

    async def _tokenizer(self) -> bytes:
        packed = await self._call(self.connection.tokenizer(MAX_PACKED, self.deadline))
        if digest_of(packed) != self._tokenizer_digest:
            raise CloudRefused(f"{self.name} sent a tokenizer that differs from its description: restart the edge")
        return packed

    async def _call(self, call: Awaitable[T]) -> T:
        """Make one attempt. A connection that stayed silent is replaced."""
        before = self.connection.endpoint.down
        try:
            return await call
        except DecodeError as error:
            raise CloudRefused(f"{self.name} is not an outrider cloud: its answer cannot be parsed") from error
        except (CallFailed, Disconnected) as error:
            if isinstance(error, CallFailed) and self.connection.endpoint.down == before:
                self.connection.reconnect()
            raise map_call_error(self.name, error, token=self.connection.has_token) from error

    async def _retry(self, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
        """Retry an attempt for up to retry_timeout seconds."""
        try:
            return await retry(self.name, self.retry_timeout, attempt, *args)
        except Retryable as last:
            raise CloudLost(f"{self.name} cannot be reached: {self._failure_reason(last)}") from last

    def _failure_reason(self, last: Retryable) -> str:
        """Return the reason of the last failure, or of the failed connection attempt if there was one."""
        connect_error = self.connection.endpoint.connect_error
        if connect_error is not None:
            return f"{connect_error} (tried for {self.retry_timeout:g} s)"
        hints = {
            "wrong version": "the server seems not to speak TLS",
            "lost at once": "if it speaks TLS, give --tls or --ca FILE (in Python tls=True or ca=FILE)",
        }
        return "; ".join([str(last), *(hint for sign, hint in hints.items() if sign in str(last))])


def _find_inconsistency(answer: schema.DescribeAnswer) -> str | None:
    """Return the part of a cloud's description that contradicts itself or the protocol, or None."""
    vocabulary, rows, ends = answer.vocab_size, answer.row_count, answer.eos_ids
    checks = {
        f"vocab_size {vocabulary}": not 0 < vocabulary <= MAX_VOCABULARY_SIZE,
        f"row_count {rows}, with a vocab_size of {vocabulary}": not vocabulary <= rows <= MAX_VOCABULARY_SIZE,
        f"{len(ends)} eos_ids": len(ends) > vocabulary,
        f"max_length {answer.max_length}": answer.max_length == 1,
        f"audio_seconds {answer.audio_seconds}": not 0 <= answer.audio_seconds < math.inf,
        f"a name of {len(answer.name)} characters": not 0 < len(answer.name) <= MAX_NAME_LENGTH,
        "a name that cannot be printed": not answer.name.isprintable(),
        "a missing or invalid fingerprint of its vocabulary": not 0 < len(answer.fingerprint) <= MAX_NAME_LENGTH,
        f"a tokenizer hash of {len(answer.tokenizer)} bytes": len(answer.tokenizer) not in (0, 32),
        "a missing or invalid model hash": not 0 < len(answer.model) <= MAX_NAME_LENGTH,
    }
    if len(ends) <= vocabulary:
        checks[f"eos_ids beyond its {rows} rows"] = max(ends, default=0) >= max(1, rows)
    return next((problem for problem, found in checks.items() if found), None)
