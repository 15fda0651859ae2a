"""`k auto` with a drafter of another tokenizer, in virtual time: hopeless drafts leave the target alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from outrider import SpeculativeDecoder, local
from outrider.decoding.speculation_switch import SpeculationSwitch
from outrider.edge import drafter, translated_drafter
from outrider.edge.round_observer import RoundObserver
from outrider.planning.virtual_time import Clock
from tests.support.tokenized_models import TokenizedEngine, ids_in, model_of, model_that_knows
from tests.support.tokenizers import trained

PROMPT = "the lazy dog"
TEXT = " the quick brown fox jumps over the lazy dog, and the dog barks" * 3
OTHER_SCRIPT = "社区的人们喜欢狐狸。" * 20
NORMALISED = "ﬁ" * 200  # "fi" in the ids of a tokenizer that applies NFKC, so that no draft fits
INCOMPLETE = "<|half a character|>"
GENERATIONS = 12
CONTROLS = 3  # generations of a pair that does not learn: each is as slow as the first


class TimedEngine(TokenizedEngine):
    """An engine whose forwards take virtual time: `first` seconds, and `more` for each token behind the first."""

    def __init__(self, engine: TokenizedEngine, clock: Clock, first: float, more: float) -> None:
        super().__init__(engine.rows, engine.tokenizer, name=engine.name)
        self._clock, self._first, self._more = clock, first, more

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        self._clock.spend(self._first + self._more * (len(ids) - 1))
        return super().forward(slot, ids, rows)


def edge_that_writes(text: str) -> TokenizedEngine:
    """An edge model that writes `text`, or half a character again and again."""
    if text != INCOMPLETE:
        return model_of("byte level", PROMPT, text)
    tokenizer = trained("byte level")
    half = ids_in("byte level", "뷁")[0]
    assert "\ufffd" in tokenizer.decode([half])
    return TokenizedEngine(lambda _: torch.eye(len(tokenizer))[half] * 30.0, tokenizer)


def tokens_per_second(
    monkeypatch: pytest.MonkeyPatch,
    edge: TokenizedEngine,
    *,
    kind: str = "llama",
    k: int | str = "auto",
    generations: int = GENERATIONS,
) -> float:
    """The tokens of several generations per second, where one of plain decoding takes a second."""
    clock = Clock()
    monkeypatch.setattr(RoundObserver.__init__, "__defaults__", (lambda: clock.now,))
    for module in (drafter, translated_drafter):  # no machine is too slow
        monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 1e9)
    target = TimedEngine(model_of(kind, PROMPT, TEXT), clock, 1.0, 0.02)
    decoder = SpeculativeDecoder(TimedEngine(edge, clock, 0.1, 0.01), local(target), k=k, on_loop="ignore")
    prompt, tokens = ids_in(kind, PROMPT), 0
    for _ in range(generations):
        tokens += len(decoder.generate(prompt, max_new_tokens=100).token_ids)
    return tokens / clock.now


@pytest.mark.parametrize(("text", "kind"), [(OTHER_SCRIPT, "llama"), (INCOMPLETE, "llama"), (NORMALISED, "unigram")])
def test_an_edge_that_does_not_write_the_script_leaves_the_target_alone(
    text: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = edge_that_writes(text)
    assert tokens_per_second(monkeypatch, edge, kind=kind) >= 0.95
    assert tokens_per_second(monkeypatch, edge, kind=kind, k=8, generations=CONTROLS) < 0.75, (
        "a fixed k is used as it was given"
    )
    monkeypatch.setattr(SpeculationSwitch, "should_speculate", lambda *_: True)
    monkeypatch.setattr(SpeculationSwitch, "is_overdrawn", lambda *_: False)
    assert tokens_per_second(monkeypatch, edge, kind=kind, generations=CONTROLS) < 0.9, "the switch would not matter"


def test_an_edge_that_writes_the_text_is_faster_than_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_per_second(monkeypatch, model_that_knows(PROMPT + TEXT)) > 1.8
