"""The bundled pair, its cloud half served by real vLLM servers: what they would have said alone comes out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider import Audio, SpeculativeDecoder, connect, load_engine, local
from outrider.engines.load import BUNDLED
from outrider.prompts.chat import encode
from tests.support import vllm_requests
from tests.support.vllm_process import Server, Start

pytestmark = pytest.mark.vllm

CLIPS = sorted((BUNDLED / "clips").glob("*.ogg"))
PENALTIES = (1.0, 1.2)
WORDS = ("slow", "你好", "éa", "x")
TEXTS = [f"Speaker {n}: {word} and then {word}, {n * 7} times over." for n in range(5) for word in WORDS]


@pytest.fixture(scope="module")
def edge():
    return load_engine("demo:edge", dtype="float32")


@pytest.fixture(scope="module")
def cloud():
    return load_engine("demo:cloud", dtype="float32")


@pytest.fixture(scope="module")
def verifier(pair_of_servers: tuple[Server, Server]):
    with connect(f"vllm://127.0.0.1:{pair_of_servers[0].port}") as verifier:
        yield verifier


def test_the_probe_finds_the_server_s_capabilities(verifier, edge) -> None:
    verifier.describe(SpeculativeDecoder(edge, verifier)._pair.state.models[0])
    capabilities = verifier.replicas[0].capabilities
    assert (capabilities.mode, capabilities.top, capabilities.normalised, capabilities.noise) == (
        "prompt_logprobs",
        256,
        False,
        0.0,
    )
    assert verifier.describe().eos_ids == edge.eos_ids


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_texts_come_out_as_the_server_generates_them(verifier, edge, pair_of_servers, k: int, penalty: float) -> None:
    decoder = SpeculativeDecoder(edge, verifier, k=k)
    assert len(TEXTS) == 20
    for text in TEXTS:
        ids = list(encode(edge, text).ids)
        out = decoder.generate(ids, max_new_tokens=16, repetition_penalty=penalty)
        assert out.token_ids == vllm_requests.completion(pair_of_servers[0].port, ids, 16, penalty)
        assert out.guarantee == "exact"


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.9},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.6, "presence_penalty": -0.4},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {str(token): 1.5 - 3.0 * (token % 3) for token in range(30, 900)}},
        {"logit_bias": {"40": 4.0, "41": -100.0}, "frequency_penalty": 2.0, "repetition_penalty": 1.3},
    ],
    ids=["frequency", "presence", "negative", "with repetition", "biases", "all"],
)
def test_penalties_and_biases_are_vllm_s_own(verifier, edge, pair_of_servers, params) -> None:
    decoder = SpeculativeDecoder(edge, verifier, k=4)
    biases = {int(token): bias for token, bias in params.get("logit_bias", {}).items()}
    changed = 0
    for text in TEXTS:
        ids = list(encode(edge, text).ids)
        wanted = vllm_requests.completion(pair_of_servers[0].port, ids, 24, **params)
        out = decoder.generate(ids, max_new_tokens=24, **{**params, "logit_bias": biases})
        assert out.token_ids == wanted
        changed += wanted != vllm_requests.completion(pair_of_servers[0].port, ids, 24)
    assert changed >= 3


@pytest.mark.parametrize("penalty", PENALTIES)
def test_captions_come_out_as_the_server_generates_them(verifier, edge, pair_of_servers, penalty: float) -> None:
    for driver in ("sequential", "pipelined"):
        decoder = SpeculativeDecoder(edge, verifier, driver=driver)
        for clip in CLIPS[:6]:
            prompt = encode(edge, Audio(clip))
            expected = vllm_requests.caption(pair_of_servers[0].port, prompt, edge.audio.placeholder, 48, penalty)
            out = decoder.generate(Audio(clip), max_new_tokens=48, repetition_penalty=penalty)
            assert out.token_ids == expected
            assert out.stats.media_bytes_up > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05, "top_k": 50, "repetition_penalty": 1.1},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 12},
    ],
    ids=str,
)
def test_draws_and_bans_are_those_of_our_own_cloud(verifier, edge, cloud, settings) -> None:
    ours, theirs = SpeculativeDecoder(edge, local(cloud)), SpeculativeDecoder(edge, verifier)
    for seed, clip in enumerate(CLIPS[:5]):
        asked = {**settings, "seed": seed, "max_new_tokens": 32}
        assert theirs.generate(Audio(clip), **asked).token_ids == ours.generate(Audio(clip), **asked).token_ids


def test_a_server_that_was_not_started_for_it(pair_of_servers, edge, caplog) -> None:
    """The fall-back says so once, and its output is the same."""
    port = pair_of_servers[1].port
    with connect(f"vllm://127.0.0.1:{port}") as verifier:
        decoder = SpeculativeDecoder(edge, verifier)
        for text in TEXTS[:6]:
            ids = list(encode(edge, text).ids)
            assert decoder.generate(ids, max_new_tokens=16).token_ids == vllm_requests.completion(port, ids, 16, 1.0)
        assert caplog.text.count("Restart vllm serve with --enable-scale-out to enable them") == 1


def test_one_of_two_replicas_is_killed(pair_of_servers, start: Start, edge) -> None:
    """In the middle of 50 generations, by several threads: all 50 are right."""
    first, second = pair_of_servers
    prompts = [list(encode(edge, f"{n} {TEXTS[n % 20]}").ids) for n in range(50)]
    expected = [vllm_requests.completion(first.port, ids, 16, 1.0) for ids in prompts]
    with connect(f"vllm://127.0.0.1:{first.port},127.0.0.1:{second.port}", patience=60) as verifier:
        decoder = SpeculativeDecoder(edge, verifier)
        found = []
        for n, ids in enumerate(prompts):
            if n == 20:
                with ThreadPoolExecutor(1) as later:
                    later.submit(second.kill)
                    found.append(decoder.generate(ids, max_new_tokens=16).token_ids)
                continue
            found.append(decoder.generate(ids, max_new_tokens=16).token_ids)
        served = [replica.client.endpoint.up for replica in verifier.replicas]
    assert found == expected
    assert min(served) > 0  # both had sessions before
