"""The ledger against a count of our own: every byte that crosses is somebody's, and what must not cross does not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.link_thread import LinkThread
from outrider import Audio, Result, SpeculativeDecoder, connect
from outrider.engines.load import BUNDLED
from outrider.prompts.audio import load
from outrider.prompts.media import pack_audio, pack_features
from tests.support.certificates import Authority
from tests.support.chaos_cases import CLIPS, check_books
from tests.support.forked_clouds import Cloud, Nursery
from tests.support.locked_engine import Guarded
from tests.support.wiretap import Tap

pytestmark = pytest.mark.network

MAGIC = b"fLaC"
DRIVERS = ("sequential", "pipelined")
TEXT = "the speaker, whose name is Wilhelmina, talks slowly and calmly 说话很慢"
UNCLAIMED = 1500  # bytes, of the goodbyes of at most a dozen sessions
MESSAGE_HEAD = 5 + 8  # gRPC's prefix, and a Media message's own fields at most


def clip(number: int) -> Audio:
    return Audio(BUNDLED / "clips" / CLIPS[number]["file"], lang=CLIPS[number]["lang"], task="concise")


@dataclass
class Wire:
    """A cloud behind two independent counters, and a verifier in front of them."""

    verifier: Any
    link: LinkThread
    tap: Tap

    def check_sum(self, results: list[Result]) -> None:
        """Ledgers and what nobody claimed are the bytes that crossed, to the byte; closes the verifier."""
        self.verifier.disconnect()
        endpoint = self.verifier.connection.endpoint
        account = endpoint.accounting
        booked = (account._recorded_up, account._recorded_down)
        assert booked == (
            sum(result.stats.bytes_up for result in results),
            sum(result.stats.bytes_down for result in results),
        )
        self.tap.wait()
        crossed = (len(self.tap.up), len(self.tap.down))
        assert crossed == (self.link.up, self.link.down) == (endpoint.up, endpoint.down)
        unclaimed = (crossed[0] - booked[0], crossed[1] - booked[1])
        assert all(0 <= rest < UNCLAIMED for rest in unclaimed), "only goodbyes belong to nobody"


@contextmanager
def wired(cloud: Cloud, **options: Any) -> Iterator[Wire]:
    """edge → link → tap → cloud."""
    with ExitStack() as stack:
        tap = stack.enter_context(Tap(cloud.port))
        link = stack.enter_context(LinkThread("127.0.0.1", tap.port))
        verifier: Any = connect(f"grpc://127.0.0.1:{link.port}", **options)
        stack.callback(verifier.connection.close)
        yield Wire(verifier, link, tap)


@pytest.fixture(params=["plain", "tls"])
def wire(request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path) -> Iterator[Wire]:
    spec: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if request.param == "tls":
        authority = Authority(tmp_path)
        issued = authority.server()
        spec = {"tls": [str(issued.cert), str(issued.key)]}
        options = {"ca": str(authority.ca)}
    cloud = nursery.cloud(**spec)
    with wired(cloud, **options) as wire:
        yield wire
    cloud.close()


@pytest.fixture
def open_wire(cloud: Cloud) -> Iterator[Wire]:
    """Without TLS, so that what crosses can be read."""
    with wired(cloud) as wire:
        yield wire


# Every byte -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_ledgers_and_the_unclaimed_rest_are_what_crossed(wire: Wire, edge: Guarded, driver: Any) -> None:
    decoder = SpeculativeDecoder(edge, wire.verifier, driver=driver)
    results = [decoder.generate(prompt, max_new_tokens=24) for prompt in (TEXT, clip(6), [30, 40, 50], clip(0))]
    for result in results:
        check_books(result)
        assert result.stats.bytes_up > 0 < result.stats.bytes_down
    wire.check_sum(results)


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_same_with_several_sessions_at_once(wire: Wire, edge: Guarded, driver: Any) -> None:
    def generate(number: int) -> Result:
        decoder = SpeculativeDecoder(edge, wire.verifier, driver=driver, k=2 + number % 4)
        return decoder.generate(clip(number) if number % 2 else TEXT, max_new_tokens=16)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(generate, range(12)))
    for result in results:
        check_books(result)
    wire.check_sum(results)


def test_cloud_only_decoding_is_booked_too(wire: Wire, edge: Guarded) -> None:
    decoder = SpeculativeDecoder(None, wire.verifier)
    results = [decoder.generate([30, 40, 50 + n], max_new_tokens=12, ignore_eos=True) for n in range(3)]
    for result in results:
        check_books(result)
        assert result.ledger["up"]["generate"] > 0
        assert "verify" not in result.ledger["up"]
    wire.check_sum(results)


# What of a recording crosses ------------------------------------------------------------------------------------------


def test_audio_crosses_once_per_session(open_wire: Wire, edge: Guarded) -> None:
    decoder = SpeculativeDecoder(edge, open_wire.verifier)
    for number in (1, 7, 1):
        before = open_wire.tap.up.count(MAGIC)
        result = decoder.generate(clip(number), max_new_tokens=30)
        size = len(pack_audio(load(clip(number))))
        assert result.stats.rounds > 2
        assert size <= result.stats.media_bytes_up <= size + MESSAGE_HEAD
        assert open_wire.tap.up.count(MAGIC) == before + 1
    assert MAGIC not in open_wire.tap.down


@pytest.mark.parametrize("gate", ["never", "entropy:50"], ids=["never", "a sure block"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_nothing_crosses_where_nothing_escalates(open_wire: Wire, edge: Guarded, gate: str, driver: Any) -> None:
    decoder = SpeculativeDecoder(edge, open_wire.verifier, gate=gate, driver=driver)
    greeting = len(open_wire.tap.up)
    result = decoder.generate(clip(6), max_new_tokens=20)
    assert result.guarantee == "edge-only"
    assert (result.stats.bytes_up, result.stats.bytes_down, result.ledger) == (0, 0, {"up": {}, "down": {}})
    assert len(open_wire.tap.up) - greeting < 100, "at most an acknowledgement of the transport's own"
    open_wire.verifier.disconnect()
    assert MAGIC not in open_wire.tap.up


@pytest.mark.parametrize("driver", DRIVERS)
def test_privacy_tokens_keeps_the_recording_here(open_wire: Wire, edge: Guarded, driver: Any) -> None:
    decoder = SpeculativeDecoder(edge, open_wire.verifier, privacy="tokens", driver=driver)
    result = decoder.generate(clip(6), max_new_tokens=20)
    assert result.guarantee == "best-effort"
    assert result.stats.rounds > 0
    assert result.stats.media_bytes_up == 0
    assert "media" not in result.ledger["up"]
    open_wire.check_sum([result])
    sent = bytes(open_wire.tap.up)
    waveform = load(clip(6))
    assert MAGIC not in sent
    assert pack_features(edge.audio.features(waveform))[8:40] not in sent
    assert len(sent) < 2000, "there is no room for a recording in it"


@pytest.mark.parametrize("driver", DRIVERS)
def test_privacy_features_sends_features_and_nothing_else(open_wire: Wire, edge: Guarded, driver: Any) -> None:
    decoder = SpeculativeDecoder(edge, open_wire.verifier, privacy="features", driver=driver)
    result = decoder.generate(clip(6), max_new_tokens=20)
    features = pack_features(edge.audio.features(load(clip(6))))
    sent = bytes(open_wire.tap.up)
    assert MAGIC not in sent
    assert sent.count(features[8:40]) == 1
    assert len(features) <= result.stats.media_bytes_up <= len(features) + MESSAGE_HEAD * (1 + len(features) // 2**18)
    open_wire.check_sum([result])


# Text -----------------------------------------------------------------------------------------------------------------


def words(text: str) -> list[bytes]:
    """Pieces of a text that cannot be there by chance: words of four letters, pairs of Chinese characters."""
    western = [word.strip(".,") for word in text.split() if len(word.strip(".,")) >= 4 and word.isascii()]
    han = [text[n : n + 2] for n in range(len(text) - 1) if all("一" <= letter <= "鿿" for letter in text[n : n + 2])]
    return [word.encode() for word in (*western, *han)]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("cut", [False, True], ids=["one session", "lost and opened again"])
def test_no_text_ever_crosses(open_wire: Wire, edge: Guarded, cloud: Cloud, driver: Any, cut: bool) -> None:
    """Neither the prompt's, nor the output's, nor a stop string's; in any encoding that we would use by accident."""
    decoder = SpeculativeDecoder(edge, open_wire.verifier, driver=driver, on_cloud_loss="wait")
    texts = [TEXT, "unmistakable"]
    for prompt in (TEXT, clip(0), clip(6)):
        stream = decoder.stream(prompt, max_new_tokens=30, ignore_eos=True, stop=["unmistakable"])
        first = next(stream)
        if cut:
            cloud.restart()
        texts.append(first.text + "".join(event.text for event in stream if event.kind != "provisional"))
    assert sum(map(len, map(words, texts))) > 20, "the outputs are texts"
    for crossed in (bytes(open_wire.tap.up), bytes(open_wire.tap.down)):
        for word in {word for text in texts for word in words(text)}:
            assert word not in crossed
            assert word.decode().encode("utf-16-le") not in crossed
