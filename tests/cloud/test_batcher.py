"""Many sessions read together get the verdicts that each would get alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.engines.torch.engine import TorchEngine
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier
from outrider.verifiers.session import MAX_AUDITED
from tests.support import tiny_text_models
from tests.support.batcher import (
    Edge,
    RecordingEngine,
    V,
    running_batcher,
    session_entry,
    submit_together,
    target_tokens,
)
from tests.support.processes import HANG_S

tokens = st.lists(st.integers(0, V - 1) | st.none(), max_size=5)
moves = st.one_of(st.none(), st.just("again"), st.tuples(st.just([]) | tokens, tokens))


@given(
    prompts=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=130), min_size=1, max_size=5),
    waves=st.lists(st.lists(moves, min_size=5, max_size=5), min_size=1, max_size=6),
    slots=st.integers(1, 4),
    options=st.sampled_from([{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}]),
)
@settings(max_examples=60)
def test_verdicts_are_those_that_each_session_would_get_alone(
    prompts: list[list[int]], waves: list[list[Any]], slots: int, options: dict[str, Any]
) -> None:
    """Skipped tokens, repeats, and fewer slots than sessions included."""
    engine = RecordingEngine()
    with running_batcher(engine, slots, chunk=100) as batcher:
        edges = [Edge(engine, prompt, **options) for prompt in prompts]
        for wave in waves:
            asked = []
            for edge, move in zip(edges, wave, strict=False):
                if move is None or (move == "again" and edge.request is None):
                    continue
                request = edge.request if move == "again" else edge.next(*move)
                assert request is not None
                asked.append((edge, request))
            answers = submit_together(batcher, *((edge.entry, request) for edge, request in asked))
            for (edge, _), answer in zip(asked, answers, strict=True):
                edge.check(answer.result(HANG_S))


def test_a_real_model_gives_the_verdicts_of_a_local_verifier() -> None:
    model = tiny_text_models.model("qwen2")
    engine, alone = TorchEngine(model), LocalVerifier(TorchEngine(model))
    prompts = [tiny_text_models.tokens(count, count) for count in (1, 7, 40, 150, 9)]
    with running_batcher(engine, 3, chunk=64) as batcher:
        settings_ = [{}, {"temperature": 1.0, "seed": 9}, {"repetition_penalty": 1.2}, {}, {"no_repeat_ngram_size": 2}]
        entries = [session_entry(engine, prompt, **own) for prompt, own in zip(prompts, settings_, strict=True)]
        sessions = [
            alone.open(Prompt(tuple(prompt)), SessionParams(GenerationSettings(**own), "exact", tiny_text_models.VOCAB))
            for prompt, own in zip(prompts, settings_, strict=True)
        ]
        accepted = 0
        for round_ in range(1, 7):
            asked = []
            for n, each in enumerate(entries):
                drafts = tiny_text_models.tokens(round_ - 1, 10 * round_ + n)
                if round_ % 2:  # what the target itself would say, then something else
                    probe = LocalVerifier(alone.engine)
                    copy = probe.open(
                        Prompt(tuple(each.session.ids)), SessionParams(each.settings, "exact", tiny_text_models.VOCAB)
                    )
                    stream = probe.generate(copy)
                    drafts = [*(next(stream).next_token for _ in range(n)), *drafts][:5]
                    probe.close(copy)
                asked.append(Verify(round_, len(each.session.ids), (), tuple(drafts)))
            answers = submit_together(batcher, *zip(entries, asked, strict=True))
            for session, request, answer in zip(sessions, asked, answers, strict=True):
                verdict = answer.result(HANG_S)
                accepted += verdict.accepted
                assert verdict == alone.verify(session, request)
        assert accepted > 5


def test_blocks_of_different_lengths_are_one_forward() -> None:
    engine = RecordingEngine()
    with running_batcher(engine, 5) as batcher:
        entries = [session_entry(engine, [n, 1, 2]) for n in range(5)]
        for each in submit_together(batcher, *((r, Verify(1, 3, (), (1,) * k)) for k, r in enumerate(entries))):
            each.result(HANG_S)
    assert [[(len(feed.ids), feed.logits_to_keep) for feed in batch] for batch in engine.batches] == [
        [(3 + k, k + 1) for k in range(5)]
    ]


def test_no_forward_has_more_sessions_than_the_batch_may() -> None:
    engine = RecordingEngine()
    with running_batcher(engine, 5, max_batch=2) as batcher:
        answers = submit_together(batcher, *((session_entry(engine, [n]), Verify(1, 1, (), ())) for n in range(5)))
        assert all(answer.result(HANG_S) for answer in answers)
    assert [len(batch) for batch in engine.batches] == [2, 2, 1]


def test_skipped_tokens_beyond_what_is_audited_cost_no_rows() -> None:
    engine = RecordingEngine()
    with running_batcher(engine) as batcher:
        ids = target_tokens([1], 300)
        (answer,) = submit_together(batcher, (session_entry(engine, [1]), Verify(1, 301, tuple(ids), ())))
        verdict = answer.result(HANG_S)
    assert verdict == Verdict(1, 0, target_tokens([1, *ids], 1)[0], (), MAX_AUDITED, 0)
    assert max(feed.logits_to_keep for batch in engine.batches for feed in batch) == MAX_AUDITED + 1
