"""Recording: what a trace says is what a live run of the same pair does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import SpeculativeDecoder, load_engine, local
from outrider.config import GenerationSettings
from outrider.decoding.gate import compute_signals
from outrider.engines.load import BUNDLED
from outrider.errors import SettingsError
from outrider.planning import trace_recorder as recording
from outrider.planning.costs import StepCosts
from outrider.planning.simulator import Outcome, Setup, replay, simulate
from outrider.planning.timing import measure_costs
from outrider.planning.trace_recorder import Recorder, record
from outrider.planning.traces import Trace
from outrider.prompts.audio import Audio
from outrider.protocol.media_messages import pack_media
from tests.support.fakes import HashRows, ScriptedEngine, blend

V, EOS = 24, 2
TARGET = HashRows(1, V)
DRAFT = blend(TARGET, HashRows(2, V), 0.25)
PROMPTS = [[3, 1, 4, 1, 5], [9, 8, 7], [6, 6, 1, 3]]
COSTS = StepCosts(draft_s=0.004, verify_s=0.03)
SAMPLED = {"temperature": 0.8, "top_k": 12, "seed": 5}
CONSTRAINED = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 10}
# Not drafted and verified: behind a wrong token a live drafter sees that token, and may end there; a trace does not.
COUNTERS = ("rounds", "blocks", "escalated", "accepted", "cloud_tokens", "edge_tokens")


def engine(rows: Any) -> Any:
    return ScriptedEngine(rows, V, eos_ids=(EOS,))


def engines() -> tuple[Any, Any]:
    return engine(DRAFT), engine(TARGET)


def recorded(**settings: Any) -> list[Trace]:
    draft, target = engines()
    traces = list(record(draft, local(target), PROMPTS, GenerationSettings(**{"max_new_tokens": 40, **settings})))
    assert not draft.open_slots
    assert not target.open_slots
    return traces


def counted(result: Any) -> list[int]:
    return [getattr(result.stats, name) for name in COUNTERS]


def simulated(outcome: Outcome) -> list[int]:
    return [getattr(outcome, name) for name in COUNTERS]


@pytest.mark.parametrize("settings", [{}, SAMPLED, CONSTRAINED, SAMPLED | CONSTRAINED])
def test_the_target_is_what_the_target_alone_says(settings: dict[str, Any]) -> None:
    for prompt, trace in zip(PROMPTS, recorded(**settings), strict=True):
        alone = SpeculativeDecoder(None, local(engine(TARGET))).generate(prompt, max_new_tokens=40, **settings)
        assert list(trace.target) == alone.token_ids
        assert trace.prompt_tokens == len(prompt)
        assert trace.media_bytes == 0


@pytest.mark.parametrize("settings", [{}, SAMPLED, CONSTRAINED, SAMPLED | CONSTRAINED])
@pytest.mark.parametrize("k", [1, 5])
def test_a_replay_accepts_what_a_live_run_accepts(settings: dict[str, Any], k: int) -> None:
    draft, target = engines()
    decoder = SpeculativeDecoder(draft, local(target), k=k)
    for prompt, trace in zip(PROMPTS, recorded(**settings), strict=True):
        live = decoder.generate(prompt, max_new_tokens=40, **settings)
        outcome = simulate(trace, Setup(k=k, max_new_tokens=40), COSTS, ends=frozenset({EOS}))
        assert (outcome.tokens, simulated(outcome)) == (len(live.token_ids), counted(live))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_signals_are_those_of_the_drafters_own_rows(temperature: float) -> None:
    for prompt, trace in zip(PROMPTS, recorded(temperature=temperature, seed=3), strict=True):
        for n, (token, signals) in enumerate(zip(trace.draft, trace.signals, strict=True)):
            row = DRAFT((*prompt, *trace.target[:n]))
            assert signals == compute_signals(row, token, temperature)
            if not temperature:
                assert token == int(torch.argmax(row))


def test_a_long_output_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded()
    monkeypatch.setattr(recording, "CHUNK", 7)
    assert recorded() == whole


def test_traces_have_names() -> None:
    draft, target = engines()
    settings = GenerationSettings(max_new_tokens=3)
    assert [t.id for t in record(draft, local(target), PROMPTS, settings)] == ["1", "2", "3"]
    assert [t.id for t in record(draft, local(target), PROMPTS, settings, names=["a", "b", "c"])] == ["a", "b", "c"]


def test_text_rules_need_a_tokenizer() -> None:
    draft, target = engines()
    with pytest.raises(SettingsError, match="tokenizer"):
        Recorder(draft, local(target), GenerationSettings(sentences=1))


def test_costs_of_real_steps_are_positive_and_leave_nothing_open() -> None:
    draft, target = engines()
    costs = measure_costs(draft, local(target), PROMPTS[:1], GenerationSettings(max_new_tokens=8), repeats=1)
    assert costs.draft_s > 0
    assert costs.verify_s > 0
    assert costs.stream_s is not None
    assert 0 < costs.stream_s < 1
    whole = costs.verify_s + costs.verify_per_token_s * 8  # of a line through few points, either part may be 0
    assert costs.per_round_overhead_s < whole  # nothing is between the two but a function call
    assert not draft.open_slots
    assert not target.open_slots


# The bundled pair -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return load_engine("demo:edge"), local(load_engine("demo:cloud"))


def test_the_bundled_pairs_traces_replay_its_runs(pair: tuple[Any, Any]) -> None:
    """Exact runs: k = 1 to the last counter, k = 5 in all that was committed, by whom, and in how many rounds."""
    clip = Audio(BUNDLED / "clips" / "en-2.ogg", task="detailed", lang="en")
    prompts: list[Any] = [clip, list(range(5, 25))]
    traces = list(record(*pair, prompts, GenerationSettings(max_new_tokens=32)))
    encoded = SpeculativeDecoder(*pair).encode(clip)
    assert traces[0].media_bytes == len(pack_media(encoded, hides_audio=False)[1]) > 10_000
    for k in (1, 5):
        decoder = SpeculativeDecoder(*pair, k=k)
        outcomes = replay(traces, Setup(k=k, max_new_tokens=32), COSTS, ends=frozenset(pair[0].eos_ids))
        for prompt, trace, outcome in zip(prompts, traces, outcomes, strict=True):
            live = decoder.generate(prompt, max_new_tokens=32)
            assert live.token_ids == list(trace.target)
            assert simulated(outcome) == counted(live)
            assert k > 1 or (outcome.drafted, outcome.verified) == (live.stats.drafted, live.stats.verified)
