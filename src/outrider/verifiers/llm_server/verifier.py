"""The verifier for existing LLM servers (vLLM, SGLang): one server, or several replicas of one model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudLost, SettingsError
from outrider.sampling.acceptance import Verdict
from outrider.transport.byte_counts import ByteCounts
from outrider.transport.endpoint import TCP, Network
from outrider.transport.event_loop_thread import EventLoopThread
from outrider.transport.hosts import bracket_host
from outrider.transport.http_client import HttpClient
from outrider.transport.tls import ClientTls
from outrider.verifiers.base import ModelInfo, RemoteSessions, SessionParams
from outrider.verifiers.llm_server.backend import Backend, Capabilities
from outrider.verifiers.llm_server.conversations import Conversations
from outrider.verifiers.llm_server.replicas import Replica, strip_name, use_first_ready
from outrider.verifiers.llm_server.session import LlmServerSession
from outrider.verifiers.llm_server.vocabulary_check import count_shared_tokens
from outrider.verifiers.retry import Retryable, retry

T = TypeVar("T")

MAX_EOS_CANDIDATES = 256  # special tokens to test for ending the server's output


class LlmServerVerifier(RemoteSessions[LlmServerSession]):
    """The verifier over one or more LLM servers.

    hosts: (host, port) of each replica. deadline: seconds per attempt. retry_timeout: seconds from the first failed
    attempt to `CloudLost`. network: makes the connections.

    Raises (every method that sends a request):
        CloudLost: no replica answered in any attempt.
        CloudRefused: a server refused the request or cannot verify.
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
        super().__init__()
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
        self._conversations = Conversations()
        self._edge_fingerprint = ""  # of the drafter that _model_info was compared with

    def __repr__(self) -> str:
        return f"<LlmServerVerifier {self.name}>"

    def disconnect(self) -> None:
        """Close all sessions and connections."""
        self._sessions.clear()
        self._loop_thread.close()

    def probe(self) -> None:
        """Check that a replica answers and can verify. After the handshake, check each one for its model."""
        check = self._first_capabilities if self._model_info is None else self._check_replicas
        self._loop_thread.run(self._retry(check)).result()

    def forget_model(self) -> None:
        """Probe the replicas again at the next handshake, unless another drafter uses them."""
        if self._model_info is None:
            for replica in self.replicas:
                replica.capabilities = None

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        """Return the servers' description, after comparing their tokens once with those of `edge`.

        Raises:
            SettingsError: there is no drafter to compare with, and these servers do not list their vocabulary.
            VocabularyMismatch: the vocabularies differ.
        """
        if edge is not None and (self._model_info is None or self._edge_fingerprint != edge.fingerprint):
            self._model_info = self._loop_thread.run(self._retry(self._compare_vocabulary, edge)).result()
            self._edge_fingerprint = edge.fingerprint
        if self._model_info is None:
            raise SettingsError(
                f"{self.name}: --edge none is not possible with {self._backend.scheme}, which does not list its "
                "tokens: give an edge model, or lookup:TOKENIZER, for the comparison with the server's tokens"
            )
        return self._model_info

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        """Open a session, which exists on this side only."""
        noise = max(replica.capabilities.noise for replica in self.replicas if replica.capabilities is not None)
        target, conversations = self.describe(), self._conversations
        return self._add(LlmServerSession(self._backend, self.replicas, prompt, params, target, noise, conversations))

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """Send a request and return the future of its verdict."""
        return self._loop_thread.run(self._retry(self._get(session).verify, request))

    def generate(self, session: int) -> Iterator[Verdict]:
        """Yield the target's own tokens, one verdict for each token."""
        found = self._get(session).session
        while True:
            yield self.verify(session, Verify(found.rounds + 1, len(found.ids), (), ()))

    def byte_counts(self, session: int) -> ByteCounts:
        """Return the session's byte counts, including all transport bytes that no session has claimed."""
        return self._loop_thread.run(self._get(session).count_bytes()).result()

    def close(self, session: int) -> None:
        """End the session. The servers keep none, so there is no request."""
        entry = self._sessions.pop(session, None)
        if entry is not None:
            entry.close()

    # In the event loop of the connections -------------------------------------------------------------------

    async def _compare_vocabulary(self, edge: ModelInfo) -> ModelInfo:
        """Compare the vocabulary and the end tokens with those of the first replica that answers."""
        capabilities, client = await self._first_capabilities()

        async def decode(ids: Sequence[int]) -> str:
            return await self._backend.detokenize(client, capabilities, ids)

        vocab_size = await count_shared_tokens(edge, self.name, decode)
        # One request after another: parallel ones would need new connections, each with a check of the server.
        candidates = list(dict.fromkeys((*edge.eos_ids, *edge.special_ids)))[:MAX_EOS_CANDIDATES]
        eos_ids = [token for token in candidates if await self._backend.is_eos(client, capabilities, token)]
        return replace(
            edge,
            name=f"{capabilities.model} at {self.name}",
            vocab_size=vocab_size,
            row_count=max(vocab_size, edge.row_count),
            eos_ids=tuple(eos_ids),
            max_length=capabilities.max_length,
        )

    async def _first_capabilities(self) -> tuple[Capabilities, HttpClient]:
        found: list[tuple[Capabilities, HttpClient]] = []

        async def use(replica: Replica) -> None:
            found.append((await replica.ensure_ready(), replica.client))

        await use_first_ready(self.replicas, "", use)
        return found[0]

    async def _check_replicas(self) -> None:
        """Check that the replicas that answer serve the model of the handshake, and that there is one."""
        first, _ = await self._first_capabilities()
        outcomes = await asyncio.gather(*(each.check(first) for each in self.replicas), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            if not isinstance(failure, Retryable):
                raise failure
        if len(failures) == len(self.replicas):
            raise failures[-1]

    async def _retry(self, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
        try:
            return await retry(self.name, self.retry_timeout, attempt, *args)
        except Retryable as last:
            reason = strip_name(last, self.name)
            raise CloudLost(f"{self.name} cannot be reached: {reason} (tried for {self.retry_timeout:g} s)") from last


class _HttpEventLoop(EventLoopThread):
    """An event loop thread that closes the HTTP clients of its endpoints."""

    clients: Sequence[HttpClient] = ()

    async def close_clients(self) -> None:
        """Close the HTTP clients."""
        await asyncio.gather(*(client.close() for client in self.clients))
