"""A serving engine that people run already (vLLM, SGLang), on one server or several replicas, as a verifier."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import TypeVar

from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudLost, SettingsError, StateError
from outrider.sampling.acceptance import Verdict
from outrider.transport.byte_counts import ByteCounts
from outrider.transport.endpoint import TCP, Network
from outrider.transport.event_loop_thread import EventLoopThread
from outrider.transport.hosts import bracket_host
from outrider.transport.http_client import HttpClient
from outrider.transport.tls import ClientTls
from outrider.verifiers.base import ModelInfo, SessionParams
from outrider.verifiers.llm_server.backend import Backend, Capabilities
from outrider.verifiers.llm_server.replicas import Replica, strip_name, use_first_ready
from outrider.verifiers.llm_server.session import LlmServerSession
from outrider.verifiers.llm_server.vocabulary_check import count_shared_tokens
from outrider.verifiers.retry import Retryable, retry

T = TypeVar("T")

MAX_EOS_CANDIDATES = 256  # special tokens that are tried whether the server ends at them


class LlmServerVerifier:
    """Verdicts from other people's servers. hosts: the replicas, (host, port) each.

    deadline: seconds that one answer may take. retry_timeout: seconds, from the first failed attempt, before
    `CloudLost`. network: what connections are made through.

    Raises (every method that asks a server):
        CloudLost: no replica answered through all attempts.
        CloudRefused: a server says no, or cannot be used for this.
    """

    def __init__(
        self,
        backend: Backend,
        hosts: Sequence[tuple[str, int]],
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        network: Network = TCP,
        deadline: float = 30.0,
        retry_timeout: float = 10.0,
    ) -> None:
        names = ",".join(f"{bracket_host(host)}:{port}" for host, port in hosts)
        self.name, self.retry_timeout = f"{backend.scheme}://{names}", retry_timeout
        self._backend = backend
        self._loop_thread = _HttpEventLoop(self.name, hosts, network)
        self._loop_thread.clients = [
            HttpClient(endpoint, host, port, tls, token, deadline)
            for endpoint, (host, port) in zip(self._loop_thread.endpoints, hosts, strict=True)
        ]
        self.replicas = [Replica(backend, client, deadline) for client in self._loop_thread.clients]
        self._model_info: ModelInfo | None = None
        self._edge_fingerprint = ""  # the fingerprint of the edge that asked for it
        self._sessions: dict[int, LlmServerSession] = {}
        self._session_ids = count(1)

    def __repr__(self) -> str:
        return f"<LlmServerVerifier {self.name}>"

    def __enter__(self) -> LlmServerVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Forget all sessions, and close the connections."""
        self._sessions.clear()
        self._loop_thread.close()

    def probe(self) -> None:
        """Find out now whether anyone answers, and can verify."""
        self._loop_thread.run(self._retry(self._first_capabilities)).result()

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        """What the servers are, for `edge`, whose tokens theirs are compared with, once.

        Raises:
            SettingsError: no edge has asked yet: these servers do not list their vocabulary.
            VocabularyMismatch: they do not share one.
        """
        if edge is not None and (self._model_info is None or self._edge_fingerprint != edge.fingerprint):
            self._model_info = self._loop_thread.run(self._retry(self._compare_vocabulary, edge)).result()
            self._edge_fingerprint = edge.fingerprint
        if self._model_info is None:
            raise SettingsError(
                f"{self.name}: --edge none is not possible with {self._backend.scheme}, which does not list its "
                "tokens: name an edge model, whose tokens are compared with the server's"
            )
        return self._model_info

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        noise = max(replica.capabilities.noise for replica in self.replicas if replica.capabilities is not None)
        opened = LlmServerSession(self._backend, self.replicas, prompt, params, self.describe(), noise)
        session_id = next(self._session_ids)
        self._sessions[session_id] = opened
        return session_id

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """`verify`, without waiting for the answer."""
        return self._loop_thread.run(self._retry(self._get(session).verify, request))

    def verify(self, session: int, request: Verify) -> Verdict:
        return self.submit(session, request).result()

    def generate(self, session: int) -> Iterator[Verdict]:
        found = self._get(session).session
        while True:
            yield self.verify(session, Verify(found.rounds + 1, len(found.ids), (), ()))

    def byte_counts(self, session: int) -> ByteCounts:
        """What the session has cost so far, transport that nobody else claimed included."""
        return self._loop_thread.run(self._get(session).count_bytes()).result()

    def close(self, session: int) -> None:
        """The servers know of no sessions: nothing is said to them."""
        self._sessions.pop(session, None)

    def _get(self, session: int) -> LlmServerSession:
        if session not in self._sessions:
            raise StateError(f"session {session} is not open")
        return self._sessions[session]

    # In the worker's loop -----------------------------------------------------------------------------------

    async def _compare_vocabulary(self, edge: ModelInfo) -> ModelInfo:
        """Compare tokens and ends with whoever answers first."""
        capabilities, client = await self._first_capabilities()

        async def decode(ids: Sequence[int]) -> str:
            return await self._backend.detokenize(client, capabilities, ids)

        vocab_size = await count_shared_tokens(edge, self.name, decode)
        eos_ids = await self._find_eos_ids(client, capabilities, dict.fromkeys((*edge.eos_ids, *edge.special_ids)))
        return replace(
            edge,
            name=f"{capabilities.model} at {self.name}",
            vocab_size=vocab_size,
            row_count=max(vocab_size, edge.row_count),
            eos_ids=eos_ids,
            max_length=capabilities.max_length,
        )

    async def _find_eos_ids(
        self, client: HttpClient, capabilities: Capabilities, tokens: Iterable[int]
    ) -> tuple[int, ...]:
        """At which of the tokens the server ends its output."""
        candidates = list(tokens)[:MAX_EOS_CANDIDATES]  # one by one: more connections would have to be looked at again
        return tuple([token for token in candidates if await self._backend.is_eos(client, capabilities, token)])

    async def _first_capabilities(self) -> tuple[Capabilities, HttpClient]:
        found: list[tuple[Capabilities, HttpClient]] = []

        async def use(replica: Replica) -> None:
            found.append((await replica.ensure_ready(), replica.client))

        await use_first_ready(self.replicas, "", use)
        return found[0]

    async def _retry(self, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
        try:
            return await retry(self.name, self.retry_timeout, attempt, *args)
        except Retryable as last:
            reason = strip_name(last, self.name)
            raise CloudLost(f"{self.name} cannot be reached: {reason} (tried for {self.retry_timeout:g} s)") from last


class _HttpEventLoop(EventLoopThread):
    """The worker, which closes the HTTP clients of its endpoints."""

    clients: Sequence[HttpClient] = ()

    async def close_clients(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))
