"""A serving engine that people run already (vLLM, SGLang), on one server or several replicas, as a verifier."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import TypeVar

from outrider.core.acceptance import Verdict
from outrider.core.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudLost, SettingsError, StateError
from outrider.verifiers.base import Conditions, Description
from outrider.verifiers.meeting import same_tokens
from outrider.verifiers.refusals import Again
from outrider.verifiers.replicas import Replica, bare, first_ready
from outrider.verifiers.retrying import persistently
from outrider.verifiers.served_session import ServedSession
from outrider.verifiers.server import Abilities, Dialect
from outrider.wire.endpoint import TCP, Network
from outrider.wire.hosts import bracketed
from outrider.wire.ledger import Ledger
from outrider.wire.tls import ClientTls
from outrider.wire.web import Web
from outrider.wire.worker import Worker

T = TypeVar("T")

MOST_ENDS = 256  # special tokens that are tried whether the server ends at them


class ServedVerifier:
    """Verdicts from other people's servers. hosts: the replicas, (host, port) each.

    deadline: seconds that one answer may take. patience: seconds, from the first failed attempt, before `CloudLost`.
    network: what connections are made through.

    Raises (every method that asks a server):
        CloudLost: no replica answered through all attempts.
        CloudRefused: a server says no, or cannot be used for this.
    """

    def __init__(
        self,
        dialect: Dialect,
        hosts: Sequence[tuple[str, int]],
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        network: Network = TCP,
        deadline: float = 30.0,
        patience: float = 10.0,
    ) -> None:
        names = ",".join(f"{bracketed(host)}:{port}" for host, port in hosts)
        self.name, self.patience = f"{dialect.scheme}://{names}", patience
        self._dialect = dialect
        self._worker = _Lines(self.name, hosts, network)
        self._worker.webs = [
            Web(endpoint, host, port, tls, token, deadline)
            for endpoint, (host, port) in zip(self._worker.endpoints, hosts, strict=True)
        ]
        self.replicas = [Replica(dialect, web, deadline) for web in self._worker.webs]
        self._description: Description | None = None
        self._met = ""  # the fingerprint of the edge that asked for it
        self._sessions: dict[int, ServedSession] = {}
        self._numbers = count(1)

    def __repr__(self) -> str:
        return f"<ServedVerifier {self.name}>"

    def __enter__(self) -> ServedVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Forget all sessions, and close the connections."""
        self._sessions.clear()
        self._worker.close()

    def probe(self) -> None:
        """Find out now whether anyone answers, and can verify."""
        self._worker.run(self._persistently(self._first_abilities)).result()

    def describe(self, edge: Description | None = None) -> Description:
        """What the servers are, for `edge`, whose tokens theirs are compared with, once.

        Raises:
            SettingsError: no edge has asked yet: these servers do not list their vocabulary.
            VocabularyMismatch: they do not share one.
        """
        if edge is not None and (self._description is None or self._met != edge.fingerprint):
            self._description = self._worker.run(self._persistently(self._meet, edge)).result()
            self._met = edge.fingerprint
        if self._description is None:
            raise SettingsError(
                f"{self.name}: --edge none is not possible with {self._dialect.scheme}, which does not list its "
                "tokens: name an edge model, whose tokens are compared with the server's"
            )
        return self._description

    def open(self, prompt: Prompt, conditions: Conditions) -> int:
        noise = max(replica.able.noise for replica in self.replicas if replica.able is not None)
        opened = ServedSession(self._dialect, self.replicas, prompt, conditions, self.describe(), noise)
        number = next(self._numbers)
        self._sessions[number] = opened
        return number

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """`verify`, without waiting for the answer."""
        return self._worker.run(self._persistently(self._find(session).verify, request))

    def verify(self, session: int, request: Verify) -> Verdict:
        return self.submit(session, request).result()

    def generate(self, session: int) -> Iterator[Verdict]:
        found = self._find(session).session
        while True:
            yield self.verify(session, Verify(found.rounds + 1, len(found.ids), (), ()))

    def ledger(self, session: int) -> Ledger:
        """What the session has cost so far, transport that nobody else claimed included."""
        return self._worker.run(self._find(session).claim()).result()

    def close(self, session: int) -> None:
        """The servers know of no sessions: nothing is said to them."""
        self._sessions.pop(session, None)

    def _find(self, session: int) -> ServedSession:
        if session not in self._sessions:
            raise StateError(f"session {session} is not open")
        return self._sessions[session]

    # In the worker's loop -----------------------------------------------------------------------------------

    async def _meet(self, edge: Description) -> Description:
        """Compare tokens and ends with whoever answers first."""
        able, web = await self._first_abilities()

        async def decode(ids: Sequence[int]) -> str:
            return await self._dialect.text(web, able, ids)

        named = await same_tokens(edge, self.name, decode)
        ends = await self._ends(web, able, dict.fromkeys((*edge.eos_ids, *edge.special_ids)))
        return replace(
            edge,
            name=f"{able.model} at {self.name}",
            vocab_size=named,
            row_count=max(named, edge.row_count),
            eos_ids=ends,
            max_length=able.max_length,
        )

    async def _ends(self, web: Web, able: Abilities, tokens: Iterable[int]) -> tuple[int, ...]:
        """At which of the tokens the server ends its output."""
        candidates = list(tokens)[:MOST_ENDS]  # one by one: more connections would have to be looked at again
        return tuple([token for token in candidates if await self._dialect.ends(web, able, token)])

    async def _first_abilities(self) -> tuple[Abilities, Web]:
        found: list[tuple[Abilities, Web]] = []

        async def use(replica: Replica) -> None:
            found.append((await replica.ready(), replica.web))

        await first_ready(self.replicas, "", use)
        return found[0]

    async def _persistently(self, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
        try:
            return await persistently(self.name, self.patience, attempt, *args)
        except Again as last:
            reason = bare(last, self.name)
            raise CloudLost(f"{self.name} cannot be reached: {reason} (tried for {self.patience:g} s)") from last


class _Lines(Worker):
    """The worker, which closes the HTTP clients of its endpoints."""

    webs: Sequence[Web] = ()

    async def hang_up(self) -> None:
        await asyncio.gather(*(web.close() for web in self.webs))
