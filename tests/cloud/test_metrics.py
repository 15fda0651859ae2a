"""What is counted, read back from the exposition that Prometheus reads."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from outrider.cloud.metrics import Metrics
from outrider.errors import SettingsError


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """A sample's value in the text."""
    samples = (s for family in text_string_to_metric_families(metrics.text()) for s in family.samples)
    (found,) = [s.value for s in samples if s.name == name and s.labels == labels]
    return found


EVENTS: list[tuple[Callable[[Metrics], None], dict[str, float]]] = [
    (lambda m: m.set_queue_length(4), {"queue_length": 4}),
    (lambda m: m.observe_queue_wait(0.25), {"queue_seconds_count": 1, "queue_seconds_sum": 0.25}),
    (lambda m: m.count_generated(), {"generated_total": 1}),
    (lambda m: m.count_generated(9), {"generated_total": 9}),
    (lambda m: m.count_opened(), {"sessions_opened_total": 1}),
    (lambda m: m.count_rebuilt(), {"sessions_rebuilt_total": 1}),
    (lambda m: m.count_expired(), {"sessions_expired_total": 1}),
    (lambda m: m.count_expired(3), {"sessions_expired_total": 3}),
    (lambda m: m.count_evicted(), {"evictions_total": 1}),
    (
        lambda m: m.set_occupancy(sessions=5, slots_used=3, slots_total=8, cache_bytes=1 << 30),
        {"sessions": 5, "slots_used": 3, "slots_total": 8, "cache_bytes": 1 << 30},
    ),
    (
        lambda m: m.observe_batch(size=3, tokens=17, seconds=0.5),
        {"batch_size_sum": 3, "batch_tokens_sum": 17, "forward_seconds_sum": 0.5, "forward_seconds_count": 1},
    ),
    (
        lambda m: m.observe_verdicts(drafts=5, accepted=3, seconds=[0.75]),
        {"drafts_total": 5, "accepted_total": 3, "verdicts_total": 1, "verify_seconds_sum": 0.75},
    ),
]


@pytest.mark.parametrize(("happen", "expected"), EVENTS)
def test_an_event_changes_its_own_figures_and_no_others(
    happen: Callable[[Metrics], None], expected: dict[str, float]
) -> None:
    metrics = Metrics()
    happen(metrics)
    samples = [s for family in text_string_to_metric_families(metrics.text()) for s in family.samples]
    changed = {s.name: s.value for s in samples if s.value and not s.labels and not s.name.endswith("_created")}
    counts = {name for name in changed if name.endswith("_count")}
    named = {f"outrider_{name}": value for name, value in expected.items()}
    assert {name: changed[name] for name in named} == named
    assert set(changed) - counts == set(named) - counts


def test_errors_and_bytes_are_told_apart_by_label() -> None:
    metrics = Metrics()
    metrics.count_error("limit"), metrics.count_error("limit"), metrics.count_error("unauthenticated")
    metrics.count_received(100), metrics.count_sent(7)
    assert value(metrics, "outrider_errors_total", kind="limit") == 2
    assert value(metrics, "outrider_errors_total", kind="unauthenticated") == 1
    assert value(metrics, "outrider_bytes_total", direction="in") == 100
    assert value(metrics, "outrider_bytes_total", direction="out") == 7


def test_a_histogram_counts_in_its_buckets() -> None:
    metrics = Metrics()
    metrics.observe_queue_wait(0.02)
    assert value(metrics, "outrider_queue_seconds_bucket", le="0.01") == 0
    assert value(metrics, "outrider_queue_seconds_bucket", le="0.025") == 1
    metrics.observe_batch(size=200, tokens=10_000, seconds=0.001)
    assert value(metrics, "outrider_batch_size_bucket", le="128.0") == 0
    assert value(metrics, "outrider_batch_size_bucket", le="256.0") == 1
    assert value(metrics, "outrider_batch_tokens_bucket", le="4096.0") == 0
    assert value(metrics, "outrider_batch_tokens_bucket", le="16384.0") == 1


def test_services_do_not_share_figures() -> None:
    one, other = Metrics(), Metrics()
    one.count_opened()
    assert value(other, "outrider_sessions_opened_total") == 0
    assert not [family for family in REGISTRY.collect() if family.name.startswith("outrider")]


def test_figures_are_served_until_closed() -> None:
    metrics = Metrics()
    metrics.count_opened()
    port = metrics.serve("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url) as answer:
        assert b"outrider_sessions_opened_total 1.0" in answer.read()
    metrics.close()
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)
    assert metrics.serve("", port) == port  # every interface, and the port is free again
    metrics.close()


def asked(url: str, method: str) -> tuple[int, bytes, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=300) as answer:
            return answer.status, answer.read(), answer.headers["content-length"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers["content-length"]


def test_head_is_answered_as_get_without_a_body() -> None:
    metrics, well = Metrics(), [True]
    port = metrics.serve("127.0.0.1", 0, healthy=lambda: well[0])
    try:
        for path, expected in (("metrics", 200), ("health", 200), ("health?x=1", 200), ("other", 404)):
            url = f"http://127.0.0.1:{port}/{path}"
            status, body, length = asked(url, "GET")
            assert (status, int(length)) == (expected, len(body))
            assert body
            assert asked(url, "HEAD") == (expected, b"", length)
        well[0] = False
        assert asked(f"http://127.0.0.1:{port}/health", "GET")[:2] == (503, b"NOT_SERVING\n")
        assert asked(f"http://127.0.0.1:{port}/health", "HEAD")[0] == 503
    finally:
        metrics.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_every_interface_is_both_families() -> None:
    metrics = Metrics()
    port = metrics.serve("", 0)
    try:
        for host in ("127.0.0.1", "[::1]"):
            assert asked(f"http://{host}:{port}/metrics", "GET")[0] == 200
    finally:
        metrics.close()


def test_an_address_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1, port {port}"):
            Metrics().serve("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("203.0.113.1", 0)])
def test_an_address_that_cannot_be_bound_is_refused(host: str, port: int) -> None:
    with pytest.raises(SettingsError, match="metrics cannot be served"):
        Metrics().serve(host, port)


def test_serving_twice_is_a_mistake_of_ours() -> None:
    metrics = Metrics()
    metrics.serve("127.0.0.1", 0)
    try:
        with pytest.raises(RuntimeError, match="already served"):
            metrics.serve("127.0.0.1", 0)
    finally:
        metrics.close()
