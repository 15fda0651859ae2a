"""A calibrated gate's budget, live, with drafters that are scripted to break it; benchmarks/adversaries.py has more."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider import SpeculativeDecoder, local
from outrider.config import GenerationSettings, Loss
from outrider.decoding.gate import SIGNAL_NAMES, SignalName
from outrider.decoding.gate_file import ModelId
from outrider.errors import DataError
from outrider.planning.calibrate import calibrate, write_gate_file
from outrider.planning.trace_recorder import record
from tests.support.adversaries import PAIRS, Suite
from tests.support.fakes import HashRows, Rows, ScriptedEngine, blend

REQUESTS, SPLITS = 160, 4
SPARE = 0.04  # of the mean of so few splits


@cache
def suite(name: str) -> Suite:
    return Suite(name, REQUESTS)


@pytest.mark.parametrize("loss", ["outputs", "tokens"])
@pytest.mark.parametrize("name", PAIRS)
def test_no_drafter_breaks_the_budget_live(name: str, loss: Loss) -> None:
    signal = SIGNAL_NAMES[list(PAIRS).index(name) % len(SIGNAL_NAMES)]
    risk, _, _ = suite(name).splits(0.1, loss, signal, SPLITS)
    assert risk <= 0.1 + SPARE


@pytest.mark.parametrize("signal", SIGNAL_NAMES)
def test_with_the_honest_drafter_every_signal_saves_much_of_the_clouds_work(signal: SignalName) -> None:
    risk, escalation, refused = suite("honest").splits(0.1, "outputs", signal, SPLITS)
    assert (risk <= 0.1 + SPARE, escalation < 0.5, refused) == (True, True, 0)


# From models to results -----------------------------------------------------------------------------------------------

VOCAB, LIMIT = 30, 24
TARGET, OTHER = HashRows(1, VOCAB), HashRows(2, VOCAB)


def sure_behind_its_own_error(prefix: tuple[int, ...]) -> Tensor:
    """A drafter that is unsure only where the text corrects it."""
    drafted = blend(TARGET, OTHER, 0.22)
    strayed = len(prefix) > 3 and int(TARGET(prefix[:-1]).argmax()) != prefix[-1]
    would_stray = len(prefix) > 3 and int(drafted(prefix[:-1]).argmax()) != int(TARGET(prefix[:-1]).argmax())
    row = torch.zeros(VOCAB)
    row[int(drafted(prefix).argmax())] = 1.0 if would_stray and not strayed else 12.0
    return row


@pytest.mark.parametrize("rows", [sure_behind_its_own_error, blend(TARGET, OTHER, 0.1)])
def test_recorded_calibrated_and_decoded_results_keep_the_budget(rows: Rows, tmp_path: Path) -> None:
    draft, target = ScriptedEngine(rows, VOCAB), local(ScriptedEngine(TARGET, VOCAB))
    settings, prompts = GenerationSettings(max_new_tokens=LIMIT), [[n % VOCAB, n // VOCAB, 3] for n in range(160)]
    traces = list(record(draft, target, prompts, settings))  # type: ignore[arg-type]
    someone = ModelId("scripted", f"scripted-{VOCAB}")
    try:
        made = calibrate(traces[:80], epsilon=0.1, k=4, edge=someone, cloud=someone, settings=settings)
    except DataError:
        return  # refused by name: nothing is skipped
    write_gate_file(tmp_path / "gate.json", made)
    decoder = SpeculativeDecoder(draft, target, gate=f"calibrated:{tmp_path / 'gate.json'}", k=4)
    results = [decoder.generate(list(prompt), max_new_tokens=LIMIT) for prompt in prompts[80:]]
    changed = [tuple(r.token_ids) != t.target for r, t in zip(results, traces[80:], strict=True)]
    assert {result.guarantee for result in results} <= {"bounded", "exact"}
    assert np.mean(changed) <= 0.1 + SPARE
    assert results[-1].risk is not None
    assert results[-1].risk.low <= np.mean(changed) <= results[-1].risk.high
