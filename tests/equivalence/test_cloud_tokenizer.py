"""An edge with another tokenizer, or none, takes the tokenizer that its cloud sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import CloudRefused, SettingsError, SpeculativeDecoder, VocabularyMismatch, connect, prompt_lookup
from outrider.cli.build import find_target_tokenizer
from outrider.errors import PromptError
from outrider.gateway.cloud_monitor import CloudMonitor
from outrider.gateway.decoder_pool import DecoderPool, RequestOptions
from outrider.prompts.audio import Audio
from outrider.protocol.tokenizer_files import pack_tokenizer
from outrider.transport.connection import Connection
from outrider.verifiers.base import disconnect
from tests.support.cloud_server import Served, serving
from tests.support.fakes import reference_output
from tests.support.processes import HANG_S
from tests.support.tiny_models import clip
from tests.support.tokenized_models import TokenizedEngine, ids_in, model_of, model_that_knows
from tests.support.tokenizers import trained

pytestmark = pytest.mark.network

PROMPT, TEXT = "the lazy dog", " the quick brown fox 社区 jumps over 👍 the lazy dog"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "tokenizers"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The tokenizers that were fetched from a cloud."""
    found: list[bytes] = []
    original = Connection.tokenizer

    async def tokenizer(self: Connection, most: int, timeout: float) -> bytes:
        found.append(await original(self, most, timeout))
        return found[-1]

    monkeypatch.setattr(Connection, "tokenizer", tokenizer)
    return found


@pytest.fixture(scope="module")
def target() -> TokenizedEngine:
    return model_of("llama", PROMPT, TEXT, name="large")


@pytest.fixture(scope="module")
def served(target: TokenizedEngine) -> Iterator[Served]:
    with serving(target) as running:
        yield running


@pytest.fixture
def verifier(served: Served) -> Iterator[Any]:
    connected = connect(f"grpc://{served.address}", patience=0.5)
    yield connected
    disconnect(connected)


def edge() -> TokenizedEngine:
    return model_that_knows(PROMPT + TEXT)


def expected(target: TokenizedEngine) -> list[int]:
    return reference_output(target.rows, ids_in("llama", PROMPT), target.vocab_size, eos=target.eos_ids)


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_pair_with_different_tokenizers_needs_no_directory(
    driver: Any, lazy: bool, verifier: Any, target: TokenizedEngine, fetched: list[bytes]
) -> None:
    decoder = SpeculativeDecoder(edge(), verifier, k=8, driver=driver, lazy=lazy)
    result = decoder.generate(PROMPT)
    assert result.token_ids == expected(target)
    assert result.guarantee == "exact"
    assert result.stats.rounds <= 2 + len(result.token_ids) // 5
    assert "translated through text to large" in decoder.summary()
    assert len(fetched) == 1


def test_it_is_kept_by_its_hash_and_fetched_again_if_the_file_was_changed(
    served: Served, target: TokenizedEngine, fetched: list[bytes], cache: Path
) -> None:
    def generate() -> list[int]:
        with connect(f"grpc://{served.address}") as verifier:  # type: ignore[union-attr]
            return SpeculativeDecoder(edge(), verifier).generate(PROMPT).token_ids

    assert generate() == generate() == expected(target)
    assert fetched == [pack_tokenizer(target.tokenizer)]
    (kept,) = cache.iterdir()
    kept.write_bytes(pack_tokenizer(trained("unigram")))
    assert generate() == expected(target)
    assert len(fetched) == 2
    assert kept.read_bytes() == fetched[0]


def test_a_cache_that_cannot_be_written_is_no_error(
    verifier: Any, target: TokenizedEngine, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file")
    assert SpeculativeDecoder(edge(), verifier).generate(PROMPT).token_ids == expected(target)
    assert "the cloud's tokenizer is not cached" in caplog.text


def test_the_same_tokenizer_is_not_fetched(verifier: Any, target: TokenizedEngine, fetched: list[bytes]) -> None:
    assert SpeculativeDecoder(model_of("llama", PROMPT, TEXT), verifier).generate(PROMPT).token_ids == expected(target)
    assert fetched == []


def test_a_named_tokenizer_is_not_replaced(verifier: Any, fetched: list[bytes]) -> None:
    for reader in (trained("unigram"), trained("byte level")):
        with pytest.raises(VocabularyMismatch):
            SpeculativeDecoder(edge(), verifier, reader=prompt_lookup(reader))
        with pytest.raises(VocabularyMismatch):
            SpeculativeDecoder(prompt_lookup(reader), verifier)
    assert fetched == []


def test_rejection_sampling_is_refused_as_with_a_directory(verifier: Any) -> None:
    with pytest.raises(SettingsError, match=r"residual .* have different tokenizers"):
        SpeculativeDecoder(edge(), verifier, accept="residual")


@pytest.mark.parametrize("draft", [None, prompt_lookup()])
def test_an_edge_without_a_tokenizer_reads_texts_with_it(
    draft: Any, verifier: Any, target: TokenizedEngine, fetched: list[bytes]
) -> None:
    decoder = SpeculativeDecoder(draft, verifier)
    by_ids = decoder.generate(ids_in("llama", PROMPT))
    assert by_ids.text is None
    assert fetched == []
    for _ in range(2):
        result = decoder.generate(PROMPT, stop=("jumps",))
        assert result.token_ids == expected(target)[: len(result.token_ids)]
        assert (result.text or "").strip() == "the quick brown fox 社区 jumps"
    assert len(fetched) == 1
    with pytest.raises(PromptError, match="takes no audio"):
        decoder.generate(Audio(clip(0.5, seed=1)))


@pytest.mark.parametrize(
    ("sent", "error", "named"),
    [
        (b"something else", CloudRefused, "differs from its description"),
        (pack_tokenizer(trained("unigram")), VocabularyMismatch, "vocabulary"),
        (b"no zlib", CloudRefused, "a tokenizer that cannot be used"),
    ],
)
def test_a_cloud_that_sends_another_tokenizer_is_refused(sent: bytes, error: type[Exception], named: str) -> None:
    with (
        serving(model_of("llama", PROMPT, TEXT)) as served,
        connect(f"grpc://{served.address}", patience=0.5) as verifier,
    ):  # type: ignore[union-attr]
        if "description" in named:
            assert served.service._description_bytes
        served.service._packed_tokenizer = sent
        with pytest.raises(error, match=named):
            SpeculativeDecoder(edge(), verifier)


def test_the_gateway_reads_prompts_with_it(served: Served, target: TokenizedEngine) -> None:
    pool = DecoderPool(edge(), lambda _: connect(f"grpc://{served.address}"))
    for way in ("speculative", "cloud-only"):
        with pool.checkout(RequestOptions(way, k=4)) as decoder:  # type: ignore[arg-type]
            assert decoder.generate(PROMPT).token_ids == expected(target)
    pool.close()
    for engine, sent in ((edge(), True), (model_of("llama", PROMPT, TEXT), False)):
        monitor = CloudMonitor(engine, connect(f"grpc://{served.address}"))  # type: ignore[arg-type]
        assert monitor.wait(HANG_S)
        assert (monitor.target_tokenizer is not None) is sent
        monitor.close()


def test_evaluations_find_it(verifier: Any, target: TokenizedEngine) -> None:
    found = find_target_tokenizer(None, edge(), verifier)
    assert found is not None
    assert found.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert found.eos_ids == target.eos_ids
    assert find_target_tokenizer(None, model_of("llama", PROMPT, TEXT), verifier) is None
    assert find_target_tokenizer(None, edge(), None) is None
