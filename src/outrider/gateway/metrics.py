"""Prometheus metrics of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.decoding.result import Result

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Metrics of one gateway, in a registry of their own. active, waiting: called whenever the metrics are read."""

    def __init__(self, active: Callable[[], int], waiting: Callable[[], int], slots: int) -> None:
        self.registry = CollectorRegistry()
        gauges: Mapping[str, tuple[str, Callable[[], float]]] = {
            "outrider_edge_active": ("generations that run now", active),
            "outrider_edge_waiting": ("requests that wait for a slot", waiting),
            "outrider_edge_slots": ("generations that may run at once", lambda: slots),
        }
        for name, (documentation, value) in gauges.items():
            Gauge(name, documentation, registry=self.registry).set_function(value)
        self._requests = self._counter("outrider_edge_requests", "answers by endpoint and status", "path", "status")
        self._gone = self._counter("outrider_edge_disconnects", "clients that left before their answer's end")
        self._prompt = self._counter("outrider_edge_prompt_tokens", "tokens of prompts")
        self._cached = self._counter("outrider_edge_cached_tokens", "of these, tokens that were not computed again")
        self._tokens = self._counter("outrider_edge_tokens", "tokens generated, by who decided them", "source")
        self._guarantees = self._counter("outrider_edge_results", "answers by guarantee", "guarantee")
        self._blocks = self._counter("outrider_edge_blocks", "blocks drafted")
        self._escalated = self._counter("outrider_edge_escalated", "blocks that were verified")
        self._verified = self._counter("outrider_edge_verified", "drafted tokens that a verdict decided")
        self._bytes = self._counter("outrider_edge_cloud_bytes", "bytes to and from the cloud", "direction", "kind")
        self._lost = self._counter(
            "outrider_edge_cloud_lost", "answers that continued without the cloud after its loss"
        )
        self._ttft = self._histogram("outrider_edge_ttft_seconds", "from the start to the first token that counts")
        self._total = self._histogram("outrider_edge_seconds", "of a generation")
        self._queue = self._histogram("outrider_edge_queue_seconds", "wait for a slot")

    def count_response(self, path: str, status: int) -> None:
        """Count an answer that has begun. path: a declared route, because each value is a series of its own."""
        self._requests.labels(path, str(status)).inc()

    def count_disconnect(self) -> None:
        """Count a client that has disconnected before its answer's end."""
        self._gone.inc()

    def observe_queue_wait(self, seconds: float) -> None:
        """Observe the wait of a request for its slot."""
        self._queue.observe(seconds)

    def observe_result(self, result: Result) -> None:
        """Record the tokens, blocks, bytes and times of a finished generation."""
        stats = result.stats
        self._prompt.inc(result.prompt_tokens)
        self._cached.inc(stats.cached_tokens)
        for source in set(result.sources):
            self._tokens.labels(source.value).inc(result.sources.count(source))
        self._guarantees.labels(result.guarantee).inc()
        self._blocks.inc(stats.blocks)
        self._escalated.inc(stats.escalated)
        self._verified.inc(stats.verified)
        self._lost.inc(stats.cloud_lost)
        for direction, kinds in result.ledger.items():
            for kind, size in kinds.items():
                self._bytes.labels(direction, kind).inc(size)
        self._ttft.observe(stats.ttft_s)
        self._total.observe(stats.total_s)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(name, documentation, buckets=SECONDS, registry=self.registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)
