"""The synthetic drafter has the chosen acceptance rate for any block length, and takes a real drafter's time."""

from __future__ import annotations

import pytest

from benchmarks.gpu_generate import WithOracle
from benchmarks.synthetic_drafter import SyntheticDrafter, corrupt_engine
from outrider.api import local
from outrider.config import GenerationSettings
from outrider.edge.drafter import Drafter
from outrider.engines.base import CachedSequence, Prompt
from outrider.errors import SettingsError
from outrider.sampling.policy import Policy
from tests.support.fakes import HashRows, ScriptedEngine, reference_output
from tests.support.generation import block

V, PROMPT = 24, [3, 1, 4]
OUTPUT = reference_output(HashRows(1, V), PROMPT, V, max_new_tokens=600)


def oracle(alpha: float, seed: int = 0, output: list[int] = OUTPUT) -> SyntheticDrafter:
    policy = Policy.build(GenerationSettings(), (), V, len(PROMPT))
    reader = CachedSequence(ScriptedEngine(HashRows(2, V), V), Prompt(tuple(PROMPT)), "drafter")
    return SyntheticDrafter(
        Drafter(reader, policy, needs_signals=False, needs_q=False), len(PROMPT), output, alpha, seed
    )


def right(drafter: SyntheticDrafter, cut: int) -> list[bool]:
    """Whether each of the first 300 tokens was right, drafted `cut` at a time after the true ones."""
    found: list[bool] = []
    for start in range(0, 300, cut):
        ids = [*PROMPT, *OUTPUT[:start]]
        drafter.rollback_to(len(ids))
        proposals = block(drafter, ids, cut)
        found += [p.token == t for p, t in zip(proposals, OUTPUT[start:], strict=False)]
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_it_is_right_at_the_chosen_rate(alpha: float) -> None:
    found = right(oracle(alpha), 5)
    assert sum(found) / len(found) == pytest.approx(alpha, abs=0.07)


def test_errors_depend_on_seed_and_position_alone() -> None:
    assert right(oracle(0.8), 1) == right(oracle(0.8), 6)
    assert right(oracle(0.8), 5) != right(oracle(0.8, seed=1), 5)


def test_the_drafter_has_its_work_and_stays_in_step() -> None:
    drafter = oracle(0.8)
    block(drafter, PROMPT, 4)
    assert drafter._drafter._sequence.cached_len == len(PROMPT) + 3
    assert drafter.seconds > 0
    drafter.rollback_to(len(PROMPT) + 1)
    assert drafter._drafter._sequence.cached_len == len(PROMPT)
    drafter.close()


def test_behind_the_output_the_drafters_tokens_stand() -> None:
    drafter = oracle(1.0, output=OUTPUT[:2])
    tokens = [p.token for p in block(drafter, PROMPT, 4)]
    assert tokens[:2] == OUTPUT[:2]
    # handed over as one and three: the three follow the first, which is the output's
    assert tokens[2:] == reference_output(HashRows(2, V), [*PROMPT, OUTPUT[0]], V, max_new_tokens=3)[1:]


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(alpha: float) -> None:
    with pytest.raises(SettingsError, match="probability"):
        oracle(alpha)


def test_a_corrupted_engine_is_wrong_at_the_chosen_rate_however_it_is_fed() -> None:
    plain, corrupted = (ScriptedEngine(HashRows(1, V), V) for _ in range(2))
    corrupt_engine(corrupted, 0.7)
    ids = [*PROMPT, *OUTPUT[:300]]
    best = plain.forward(plain.open(Prompt(tuple(ids))), ids).argmax(-1).tolist()
    slot = corrupted.open(Prompt(tuple(ids)))
    stepwise = [int(corrupted.forward(slot, [token])[0].argmax()) for token in ids]
    corrupted.truncate(slot, 3)
    together = corrupted.forward(slot, ids[3:]).argmax(-1).tolist()
    assert stepwise[3:] == together
    same = [one == other for one, other in zip(best, stepwise, strict=True)]
    assert sum(same) / len(same) == pytest.approx(0.7, abs=0.07)


def test_an_engine_is_not_corrupted_at_a_rate_of_one() -> None:
    plain, corrupted = (ScriptedEngine(HashRows(1, V), V) for _ in range(2))
    corrupt_engine(corrupted, 1.0)
    slots = [engine.open(Prompt(tuple(PROMPT))) for engine in (plain, corrupted)]
    assert corrupted.forward(slots[1], PROMPT).equal(plain.forward(slots[0], PROMPT))


def test_a_generation_runs_with_it() -> None:
    decoder = WithOracle(ScriptedEngine(HashRows(2, V), V), local(ScriptedEngine(HashRows(1, V), V)), k=5)
    decoder.output, decoder.alpha, decoder.seed = OUTPUT, 0.8, 3
    result = decoder.generate(PROMPT, max_new_tokens=100)
    assert result.token_ids == reference_output(HashRows(1, V), PROMPT, V, max_new_tokens=100)
    assert 0.3 < result.stats.acceptance_rate < 0.8
