"""Decoders by choice, verifiers by network."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from outrider import CloudLost, SettingsError, SpeculativeDecoder, StreamEvent, local, prompt_lookup
from outrider.edge import model_pair
from outrider.edge.cancellation import Cancellation, chain_future
from outrider.engines.shared_engine import SharedEngine
from outrider.gateway import decoder_pool as pools
from outrider.gateway.decoder_pool import DecoderPool, RequestOptions
from outrider.verifiers.base import ModelInfo
from outrider.verifiers.local import LocalVerifier
from tests.support.cloud_server import Served, serving
from tests.support.fakes import HashRows, ScriptedEngine, ScriptedVerifier
from tests.support.gateway_pair import (
    PROMPTS,
    connector,
    demo_edge,
    reference_tokens,
    running_pool,
    serving_demo_cloud,
)
from tests.support.processes import HANG_S, wait_until
from tests.support.tokenized_models import model_of

V = 32
LENGTH = 24


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_demo_cloud() as running:
        yield running


@pytest.fixture
def pool(served: Served) -> Iterator[DecoderPool]:
    with running_pool(served) as made:
        yield made


class Connectable(ScriptedVerifier):
    """A verifier that can be disconnected and cut. `asked`: how often it was described."""

    def __init__(self, net: str = "none") -> None:
        super().__init__([1], V)
        self.net, self.asked, self.gone, self.is_cut = net, 0, False, False
        self.go = threading.Event()
        self.go.set()

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        self.asked += 1
        assert self.go.wait(HANG_S)
        return super().describe()

    def probe(self) -> None: ...

    def submit(self, session: int, request: Any) -> Any: ...

    def byte_counts(self, session: int) -> Any: ...

    def disconnect(self) -> None:
        self.gone = True

    def cut(self) -> None:
        self.is_cut = True


class Reached:
    """A way to clouds that counts them."""

    def __init__(self) -> None:
        self.made: list[Connectable] = []

    def __call__(self, net: str) -> Connectable:
        self.made.append(Connectable(net))
        return self.made[-1]

    @property
    def open(self) -> list[str]:
        return [verifier.net for verifier in self.made if not verifier.gone]


def scripted() -> ScriptedEngine:
    return ScriptedEngine(HashRows(1, V), V)


# Kept -------------------------------------------------------------------------------------------------------------


def test_a_decoder_is_kept_and_so_is_its_verifier() -> None:
    reached = Reached()
    pool = DecoderPool(scripted(), reached)
    first = pool.decoder(RequestOptions(k=3))
    assert pool.decoder(RequestOptions(k=3)) is first
    assert pool.decoder(RequestOptions(k=4)) is not first
    assert pool.decoder(RequestOptions(k=3, net="rtt=0.05s")) is pool.decoder(RequestOptions(k=3, net="rtt=50ms"))
    assert [verifier.net for verifier in reached.made] == ["none", "rtt=50ms"]
    assert [verifier.asked for verifier in reached.made] == [0, 0], "nothing is said to a cloud that nobody uses"


def test_options_without_effect_on_a_mode_share_its_decoder() -> None:
    pool = DecoderPool(scripted(), Reached())
    alone = pool.decoder(RequestOptions("edge-only"))
    assert (
        pool.decoder(RequestOptions("edge-only", gate="entropy:1", net="rtt=1s", privacy="tokens", scope="repair"))
        is alone
    )
    assert pool.decoder(RequestOptions("edge-only", on_loop="escalate")) is alone
    assert pool.decoder(RequestOptions("edge-only", on_loop="stop")) is not alone
    remote = pool.decoder(RequestOptions("cloud-only"))
    assert (
        pool.decoder(RequestOptions("cloud-only", gate="never", on_cloud_loss="edge-only", driver="pipelined"))
        is remote
    )
    assert (alone.verifier, remote.draft) == (None, None)


def test_only_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_DECODERS", 3)
    pool = DecoderPool(scripted(), Reached())
    first, second = (pool.decoder(RequestOptions(k=k)) for k in (1, 2))
    pool.decoder(RequestOptions(k=1))
    for k in (3, 4):
        pool.decoder(RequestOptions(k=k))
    assert pool.decoder(RequestOptions(k=1)) is first
    assert pool.decoder(RequestOptions(k=2)) is not second


def test_unused_networks_are_closed_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_VERIFIERS", 2)
    reached = Reached()
    pool = DecoderPool(scripted(), reached)
    nets = [f"rtt={n}ms" for n in range(1, 6)]
    with ExitStack() as running:
        held = running.enter_context(pool.checkout(RequestOptions(net=nets[0])))
        for net in nets[1:]:
            with pool.checkout(RequestOptions(net=net)):
                pass
        assert reached.open == [nets[0], nets[4]], "one is in use, however long"
        assert pool.decoder(RequestOptions(net=nets[0])) is held
    with pool.checkout(RequestOptions(net=nets[1])):
        assert len(reached.open) == 3, "one more, for as long as it is used"
    assert len(reached.open) == 2
    pool.close()
    assert reached.open == []


class Plain(ScriptedVerifier):
    """A verifier that cannot be cut, as other engines' servers cannot."""

    def __init__(self) -> None:
        super().__init__([1], V)
        self.gone = False

    def probe(self) -> None: ...

    def disconnect(self) -> None:
        self.gone = True


@pytest.mark.parametrize(
    "options",
    [
        RequestOptions(net="rtt=1ms", scope="repair"),
        RequestOptions(net="rtt=1ms", k=0),
        RequestOptions(net="rtt=1ms", gate="luck"),
        RequestOptions("cloud-only", net="rtt=1ms", on_loop="sample"),
        RequestOptions(net="cut", on_cloud_loss="wait"),
    ],
    ids=str,
)
def test_a_refused_request_does_not_connect_to_a_cloud(options: RequestOptions) -> None:
    reached = Reached()
    with pytest.raises(SettingsError), DecoderPool(scripted(), reached).checkout(options):
        pass
    assert reached.made == []


def test_a_cable_that_cannot_be_cut_leaves_no_verifier_behind() -> None:
    reached: list[Plain] = []

    def reach_(net: str) -> Plain:
        reached.append(Plain())
        return reached[-1]

    pool = DecoderPool(scripted(), reach_)
    for _ in range(3):
        with (
            pytest.raises(SettingsError, match="is not supported by this verifier"),
            pool.checkout(RequestOptions(net="cut")),
        ):
            pass
    assert [verifier.gone for verifier in reached] == [True] * 3
    pool.decoder(RequestOptions())
    assert not pool.cuttable


def test_networks_are_closed_also_where_a_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_VERIFIERS", 2)
    monkeypatch.setattr(DecoderPool, "_check_options", lambda self, options: None)
    reached = Reached()
    pool = DecoderPool(scripted(), reached)
    for n in range(1, 9):
        with pytest.raises(SettingsError), pool.checkout(RequestOptions(net=f"rtt={n}ms", k=0)):
            pass
    assert len(reached.open) == 2


def test_the_gateway_s_own_choice_stays_whatever_clients_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_DECODERS", 3)
    monkeypatch.setattr(pools, "MAX_VERIFIERS", 2)
    reached = Reached()
    pool = DecoderPool(scripted(), reached)
    own = pool.pin(RequestOptions(net="rtt=100ms", k="auto"))
    watched = pool.decoder(RequestOptions(net="rtt=100ms", k="auto", watch=True))
    assert pool.cuttable
    for n in range(1, 9):
        with pool.checkout(RequestOptions(net=f"rtt={n}ms")):
            pass
    assert pool.decoder(RequestOptions(net="rtt=100ms", k="auto")) is own
    assert pool.decoder(RequestOptions(net="rtt=100ms", k="auto", watch=True)) is watched
    assert "rtt=100ms" in reached.open
    assert len(reached.open) == 2
    assert len(pool._decoders) <= 3


def test_watching_learns_with_who_does_not_watch() -> None:
    pool = DecoderPool(scripted(), Reached())
    plain, watched = (pool.decoder(RequestOptions(k="auto", watch=watch)) for watch in (False, True))
    assert watched.draft_length is plain.draft_length
    assert watched._guarantees is plain._guarantees
    assert watched._lock is plain._lock
    assert pool.decoder(RequestOptions(k="auto", gate="entropy:1")).draft_length is not plain.draft_length


def test_a_cloud_in_this_process_is_shared_too_and_has_no_network() -> None:
    pool = DecoderPool(scripted(), lambda net: local(scripted()))
    verifier = pool.decoder(RequestOptions()).verifier
    assert isinstance(verifier, LocalVerifier)
    assert isinstance(verifier.engine, SharedEngine)
    for net in ("rtt=5ms", "cut"):
        with pytest.raises(SettingsError, match="without a network"):
            pool.decoder(RequestOptions(net=net))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (RequestOptions("cloudy"), "way"),  # type: ignore[arg-type]
        (RequestOptions(net="5ms"), "network condition"),
        (RequestOptions(gate="entropy"), "gate"),
        (RequestOptions(k=0), "k is"),
        (RequestOptions("cloud-only", on_loop="sample"), "on_loop"),
        (RequestOptions("edge-only", on_loop="panic"), "on_loop"),  # type: ignore[arg-type]
        (RequestOptions(net="cut", on_cloud_loss="wait"), "wait forever"),
    ],
)
def test_unavailable_options_are_refused_by_name(options: RequestOptions, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        DecoderPool(scripted(), Reached()).decoder(options)


@pytest.mark.parametrize("way", ["speculative", "cloud-only"])
def test_without_a_cloud_there_is_one_way(way: Any) -> None:
    pool = DecoderPool(scripted(), None)
    with pytest.raises(SettingsError, match="this gateway has none"):
        pool.decoder(RequestOptions(way))
    assert pool.decoder(RequestOptions("edge-only")).generate([1, 2], max_new_tokens=4).guarantee == "edge-only"


# Meeting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connection that each thread waits for."""
    found: list[Any] = []

    def chained(source: Any) -> Any:
        found.append(source)
        return chain_future(source)

    monkeypatch.setattr(model_pair, "chain_future", chained)
    return found


def test_a_cloud_is_described_once_however_many_ask_at_once(waits: list[Any]) -> None:
    verifier = Connectable()
    verifier.go.clear()
    decoder = SpeculativeDecoder(scripted(), verifier, lazy=True)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(decoder._pair.connect) for _ in range(8)]
        wait_until(lambda: len(waits) == 8)
        verifier.go.set()
        assert all(future.result(HANG_S).is_complete for future in waiting)
    assert verifier.asked == 1
    assert len(decoder._pair.state.models) == 2


def test_a_request_cancelled_during_the_handshake_leaves_it_to_the_others(waits: list[Any]) -> None:
    verifier = Connectable()
    verifier.go.clear()
    decoder = SpeculativeDecoder(scripted(), verifier, lazy=True)
    leaving = Cancellation()
    with ThreadPoolExecutor(2) as threads:
        leaver = threads.submit(decoder._pair.connect, leaving)
        wait_until(lambda: len(waits) == 1)
        stayer = threads.submit(decoder._pair.connect)
        wait_until(lambda: len(waits) == 2)
        leaving.cancel()
        with pytest.raises(CancelledError):
            leaver.result(HANG_S)
        verifier.go.set()
        assert stayer.result(HANG_S)


def test_an_error_in_the_handshake_releases_all_waiting_requests() -> None:
    class Buggy(ScriptedVerifier):
        def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
            raise ZeroDivisionError

    decoder = SpeculativeDecoder(scripted(), Buggy([1], V), lazy=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            decoder.generate([1], max_new_tokens=2)


class Named(ScriptedEngine):
    """An engine whose tokens have names, and a fingerprint of its own."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(HashRows(1, V), V)
        self.vocabulary, self._fingerprint = [f"word{n}" for n in range(V)], fingerprint

    @property
    def fingerprint(self) -> str:
        return self._fingerprint


def test_a_vocabulary_is_fetched_once_for_all_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Named("theirs")) as served:
        pool = DecoderPool(Named("ours"), connector(served))
        first: Any = pool.decoder(RequestOptions())
        fetched, fetch = [], first.verifier.connection.vocabulary

        async def vocabulary(limit: int, timeout: float) -> list[str]:
            fetched.append(limit)
            return await fetch(limit, timeout)

        monkeypatch.setattr(first.verifier.connection, "vocabulary", vocabulary)
        outputs = [pool.decoder(RequestOptions(k=k)).generate([1, 2], max_new_tokens=5).token_ids for k in (1, 2, 3)]
        pool.close()
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(fetched) == 1


# On the bundled pair ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_each_mode_generates_its_reference_output(pool: DecoderPool, prompt: str) -> None:
    cloud = list(reference_tokens("cloud-only", prompt, LENGTH))
    for driver in ("sequential", "pipelined"):
        result = pool.decoder(RequestOptions(driver=driver)).generate(prompt, max_new_tokens=LENGTH)  # type: ignore[arg-type]
        assert (result.token_ids, result.guarantee) == (cloud, "exact")
    remote = pool.decoder(RequestOptions("cloud-only")).generate(prompt, max_new_tokens=LENGTH)
    assert (remote.token_ids, remote.guarantee, bool(remote.text)) == (cloud, "exact", True)
    alone = pool.decoder(RequestOptions("edge-only")).generate(prompt, max_new_tokens=LENGTH)
    assert (alone.token_ids, alone.guarantee) == (list(reference_tokens("edge-only", prompt, LENGTH)), "edge-only")


def test_an_emulated_network_is_in_between(pool: DecoderPool) -> None:
    decoder = pool.decoder(RequestOptions(net="rtt=120ms"))
    decoder.generate("rain", max_new_tokens=2)
    result = decoder.generate("rain", max_new_tokens=2)
    assert result.stats.ttft_s >= 0.12


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_after_a_cut_the_edge_continues_long_before_patience_ends_with_a_warning(served: Served, driver: Any) -> None:
    with running_pool(served, patience=10 * HANG_S) as pool:
        check_goes_on_alone(pool, driver)


def check_goes_on_alone(pool: DecoderPool, driver: Any) -> None:
    decoder = pool.decoder(RequestOptions(gate="entropy:0.1", driver=driver, net="cut"))
    for _ in range(2):
        started = time.monotonic()
        result = decoder.generate("Hello there", max_new_tokens=LENGTH)
        assert time.monotonic() - started < HANG_S
        assert (result.guarantee, result.token_ids) == (
            "edge-only",
            list(reference_tokens("edge-only", "Hello there", LENGTH)),
        )
        assert any("the cloud was lost" in warning for warning in result.warnings)
    assert pool.decoder(RequestOptions()).generate("rain", max_new_tokens=4).guarantee == "exact", (
        "the others' cable is in"
    )


def test_after_a_cut_an_exact_gate_fails_by_default(pool: DecoderPool) -> None:
    with pytest.raises(CloudLost, match="the network is cut"):
        pool.decoder(RequestOptions(net="cut")).generate("rain", max_new_tokens=4)
    told = pool.decoder(RequestOptions(net="cut", on_cloud_loss="edge-only")).generate("rain", max_new_tokens=4)
    assert told.guarantee == "edge-only"


def test_one_decoder_counts_right_while_many_use_it(pool: DecoderPool) -> None:
    """Its lookahead learns from all of them, and its outputs stay what they are."""
    decoder = pool.decoder(RequestOptions(k="auto", driver="pipelined"))
    alone = {prompt: list(reference_tokens("cloud-only", prompt, LENGTH)) for prompt in PROMPTS}
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda prompt: decoder.generate(prompt, max_new_tokens=LENGTH), PROMPTS))
    assert [result.token_ids for result in results] == [alone[prompt] for prompt in PROMPTS]


def test_generations_that_run_at_once_tell_what_they_learnt_one_by_one(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = pool.decoder(RequestOptions(k="auto"))
    inside, overlaps = [], []

    def alone(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            overlaps.append(len(inside))
            inside.append(1)
            time.sleep(0.002)  # a call that overlapped would meet it
            try:
                return function(*args, **named)
            finally:
                inside.pop()

        return call

    assert decoder.draft_length is not None
    pace = decoder.draft_length.controller
    assert pace is not None
    for owner, name in ((pace, "drafted"), (pace, "decided"), (decoder._guarantees, "report")):
        monkeypatch.setattr(owner, name, alone(getattr(owner, name)))
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda prompt: decoder.generate(prompt, max_new_tokens=12), PROMPTS[:6]))
    assert len(overlaps) > 20
    assert not any(overlaps)


def test_watching_tells_how_sure_the_drafter_was_of_each_token_and_changes_nothing(pool: DecoderPool) -> None:
    for driver in ("sequential", "pipelined"):
        unwatched, watched = (
            list(pool.decoder(RequestOptions(driver=driver, watch=watch)).stream("Hello there", max_new_tokens=LENGTH))  # type: ignore[arg-type]
            for watch in (False, True)
        )
        assert [tokens(events) for events in (unwatched, watched)] == [
            list(reference_tokens("cloud-only", "Hello there", LENGTH))
        ] * 2
        assert not any(event.signals for event in unwatched)
        for event in watched:
            assert (event.signals is None) == (event.source.value in ("correction", "bonus"))
        known = {(e.index, e.token_id): e.signals for e in watched if e.kind == "provisional"}
        accepted = [e for e in watched if e.source.value == "accepted"]
        assert accepted
        assert all(known[event.index, event.token_id] == event.signals for event in accepted)


def tokens(events: list[StreamEvent]) -> list[int]:
    """What stands in the end."""
    return list({event.index: event.token_id for event in events if event.kind != "provisional"}.values())


# Prompt lookup ----------------------------------------------------------------------------------------------------


def test_prompt_lookup_without_a_model_writes_as_the_cloud_for_many_clients(served: Served) -> None:
    pool = DecoderPool(prompt_lookup("demo"), connector(served))
    assert pool.drafter == "lookup"

    def write(prompt: str) -> list[int]:
        with pool.checkout(RequestOptions(k=8)) as decoder:
            result = decoder.generate(prompt, max_new_tokens=LENGTH)
        assert result.guarantee == "exact"
        return result.token_ids

    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(write, PROMPTS))
        assert [tuple(ids) for ids in found] == [reference_tokens("cloud-only", prompt, LENGTH) for prompt in PROMPTS]
        with pool.checkout(RequestOptions("cloud-only")) as decoder:
            alone = decoder.generate(PROMPTS[0], max_new_tokens=LENGTH)
        assert tuple(alone.token_ids) == reference_tokens("cloud-only", PROMPTS[0], LENGTH)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (RequestOptions("edge-only"), "way 'edge-only' needs a draft model, and this gateway drafts with lookup:demo"),
        (RequestOptions(gate="entropy:1"), "gate entropy:1 needs confidence signals, which prompt lookup does not"),
        (RequestOptions(on_cloud_loss="edge-only"), "on_cloud_loss 'edge-only' needs a draft model"),
    ],
    ids=str,
)
def test_requests_that_prompt_lookup_cannot_serve_are_refused(options: RequestOptions, match: str) -> None:
    pool = DecoderPool(prompt_lookup("demo"), Reached())
    with pytest.raises(SettingsError, match=match):
        pool.decoder(options)


def test_a_model_with_lookup_writes_in_each_way(served: Served) -> None:
    pool = DecoderPool(demo_edge(), connector(served), lookup=prompt_lookup())
    assert pool.drafter == "model+lookup"
    try:
        for way in ("speculative", "edge-only", "cloud-only"):
            with pool.checkout(RequestOptions(way)) as decoder:
                assert (decoder.lookup is not None) == (way == "speculative")
                found = decoder.generate(PROMPTS[1], max_new_tokens=LENGTH).token_ids
            side = "edge-only" if way == "edge-only" else "cloud-only"
            assert tuple(found) == reference_tokens(side, PROMPTS[1], LENGTH)
    finally:
        pool.close()


# Other tokenizers -------------------------------------------------------------------------------------------------


def test_prompts_for_a_cloud_with_another_tokenizer_are_in_its_own_ids() -> None:
    text = " the quick brown fox"
    edge, target = model_of("byte level", "the lazy dog", text), model_of("llama", "the lazy dog", text)
    pool = DecoderPool(edge, lambda _: local(target), target_tokenizer=prompt_lookup(target.tokenizer))
    assert pool.target_tokenizer is not None
    outputs = {}
    for way in ("speculative", "cloud-only", "edge-only"):
        with pool.checkout(RequestOptions(way, k=4)) as decoder:  # type: ignore[arg-type]
            outputs[way] = decoder.generate("the lazy dog", max_new_tokens=60)
    assert outputs["speculative"].token_ids == outputs["cloud-only"].token_ids
    assert outputs["speculative"].stats.accepted > 0
    assert {way: (output.text or "").strip() for way, output in outputs.items()} == dict.fromkeys(outputs, text.strip())
    pool.close()


def test_a_target_tokenizer_that_is_the_edge_s_own_is_not_used() -> None:
    edge = model_of("llama", "the lazy dog", " the end")
    pool = DecoderPool(edge, lambda _: local(edge), target_tokenizer=prompt_lookup(edge.tokenizer))
    assert pool.target_tokenizer is None
    assert pool.reader is pool.engine
