"""Prometheus metrics of the service."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.cloud.metrics_server import MetricsServer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """Metrics of one service, in a registry of their own. Times are seconds, sizes bytes.

    The acceptance rate is outrider_accepted_total ÷ outrider_drafts_total, over any window.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: MetricsServer | None = None
        self._sessions = self._gauge("outrider_sessions", "sessions open now")
        self._slots_used = self._gauge("outrider_slots_used", "cache slots that hold a session")
        self._slots_total = self._gauge("outrider_slots_total", "cache slots there are")
        self._cache_bytes = self._gauge("outrider_cache_bytes", "bytes that the KV caches take")
        self._queue_length = self._gauge("outrider_queue_length", "requests that wait for a batch")
        self._queue_seconds = self._histogram("outrider_queue_seconds", "wait of a request for its batch", SECONDS)
        self._batch_size = self._histogram("outrider_batch_size", "requests in a forward", ROWS)
        self._batch_tokens = self._histogram("outrider_batch_tokens", "tokens in a forward", TOKENS)
        self._forward_seconds = self._histogram("outrider_forward_seconds", "time of a forward", SECONDS)
        self._verify_seconds = self._histogram("outrider_verify_seconds", "from request to verdict", SECONDS)
        self._drafts = self._counter("outrider_drafts", "draft tokens that were verified")
        self._accepted = self._counter("outrider_accepted", "draft tokens that were accepted")
        self._verdicts = self._counter("outrider_verdicts", "verdicts given")
        self._prefix_queries = self._counter("outrider_prefix_cache_queries", "tokens of newly opened sessions")
        self._prefix_hits = self._counter("outrider_prefix_cache_hits", "of these, tokens with a kept KV cache")
        self._generated = self._counter("outrider_generated", "tokens of cloud-only decoding")
        self._opened = self._counter("outrider_sessions_opened", "sessions opened")
        self._rebuilt = self._counter("outrider_sessions_rebuilt", "sessions whose cache was computed again")
        self._expired = self._counter("outrider_sessions_expired", "sessions ended for being idle")
        self._evictions = self._counter("outrider_evictions", "cache slots taken from an idle session")
        self._errors = self._counter("outrider_errors", "requests that failed", "kind")
        self._bytes = self._counter("outrider_bytes", "bytes of messages", "direction")

    def set_occupancy(self, sessions: int, slots_used: int, slots_total: int, cache_bytes: int) -> None:
        """Set the gauges of sessions, KV slots and KV-cache memory."""
        self._sessions.set(sessions)
        self._slots_used.set(slots_used)
        self._slots_total.set(slots_total)
        self._cache_bytes.set(cache_bytes)

    def set_queue_length(self, requests: int) -> None:
        """Set the number of requests that wait."""
        self._queue_length.set(requests)

    def observe_queue_wait(self, seconds: float) -> None:
        """Observe the wait of a request that left the queue."""
        self._queue_seconds.observe(seconds)

    def observe_batch(self, size: int, tokens: int, seconds: float) -> None:
        """Observe a forward of `size` requests with `tokens` tokens in total."""
        self._batch_size.observe(size)
        self._batch_tokens.observe(tokens)
        self._forward_seconds.observe(seconds)

    def observe_verdicts(self, drafts: int, accepted: int, seconds: Seq[float]) -> None:
        """Observe the verdicts of a forward. drafts, accepted: in total. seconds: of each, since its request."""
        self._verdicts.inc(len(seconds))
        self._drafts.inc(drafts)
        self._accepted.inc(accepted)
        for each in seconds:
            self._verify_seconds.observe(each)

    def count_prefix(self, cached: int, tokens: int) -> None:
        """Count the tokens of a new session's first request, and those whose KV cache was kept from its base."""
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(cached)

    def count_generated(self, tokens: int = 1) -> None:
        """Count tokens of cloud-only decoding."""
        self._generated.inc(tokens)

    def count_opened(self) -> None:
        """Count an opened session."""
        self._opened.inc()

    def count_rebuilt(self) -> None:
        """Count a KV cache that has to be computed again."""
        self._rebuilt.inc()

    def count_expired(self, sessions: int = 1) -> None:
        """Count sessions that ended for being idle."""
        self._expired.inc(sessions)

    def count_evicted(self) -> None:
        """Count a slot taken from an idle session."""
        self._evictions.inc()

    def count_error(self, kind: str) -> None:
        """Count a failed request. kind: from a small fixed set, because each value is a series of its own."""
        self._errors.labels(kind).inc()

    def count_received(self, size: int) -> None:
        """Count the bytes of a received message."""
        self._bytes.labels("in").inc(size)

    def count_sent(self, size: int) -> None:
        """Count the bytes of a sent message."""
        self._bytes.labels("out").inc(size)

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def serve(self, host: str, port: int, healthy: Callable[[], bool] = lambda: True) -> int:
        """Serve the metrics over HTTP until `close`, and return the bound port.

        port: 0 lets the system choose. healthy: the answer of `/health`.

        Raises:
            SettingsError: the address cannot be bound.
        """
        if self._server is not None:
            raise RuntimeError("these metrics are already served: call close() first")
        self._server = MetricsServer(host, port, self.text, healthy)
        return self._server.port

    def close(self) -> None:
        """Stop serving. Does nothing if it is not serving."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(name, documentation, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)
