"""Measurement of the step costs of a pair."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median
from typing import TypeVar

from outrider.config import GenerationSettings
from outrider.decoding.actions import Draft, Verify
from outrider.edge.drafter import Drafter
from outrider.engines.base import CachedSequence, Engine, Prompt
from outrider.engines.prefix_cache import unique_salt
from outrider.planning.costs import StepCosts, median_costs
from outrider.planning.trace_recorder import Recorder
from outrider.planning.validation import count
from outrider.prompts.chat import PromptLike, encode
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import Verifier

T = TypeVar("T")

STREAM_TOKENS = 25  # tokens of a stream that are timed together
TIMED_STEPS = 5  # drafted tokens that are timed together, and blocks and verdicts of each kind
FEW_DRAFTS, MANY_DRAFTS = 1, 8  # drafts in the timed verdicts
MIN_SECONDS = 1e-7  # lower bound of a step's time


def measure_costs(
    draft: Engine,
    target: Verifier,
    prompts: Seq[PromptLike],
    settings: GenerationSettings | None = None,
    *,
    repeats: int = 3,
) -> StepCosts:
    """Time the steps of a pair. Returns medians over prompts and repeats.

    If verdicts report their computing time, the rest of their latency counts as overhead. Measure such a verifier
    without network delay, because a simulation adds the network itself.
    """
    count(1, repeats=repeats)
    recorder = Recorder(draft, target, settings)
    encoded = [encode(draft, prompt) for prompt in prompts]
    outputs = [recorder.generate_target(prompt) for prompt in encoded]  # also warms up the engines
    turns = [each for _ in range(repeats) for each in zip(encoded, outputs, strict=True)]
    return median_costs([_measure(recorder, prompt, output) for prompt, output in turns])


def _measure(recorder: Recorder, prompt: Prompt, output: list[int]) -> StepCosts:
    first, plain, with_signals = _drafting(recorder, prompt)
    opening, few, overhead = _verdicts(recorder, prompt, output, FEW_DRAFTS)
    _, many, _ = _verdicts(recorder, prompt, output, MANY_DRAFTS)
    slope = max(0.0, (many - few) / (MANY_DRAFTS - FEW_DRAFTS))
    return StepCosts(
        draft_s=max(plain, MIN_SECONDS),
        signals_s=max(0.0, with_signals - plain),
        draft_prefill_s=max(0.0, first - plain),
        verify_s=max(few - FEW_DRAFTS * slope, MIN_SECONDS),
        verify_per_token_s=slope,
        verify_prefill_s=max(0.0, opening - few - overhead),
        per_round_overhead_s=overhead,
        stream_s=max(_streaming(recorder, prompt, len(output)), MIN_SECONDS),
    )


def _drafting(recorder: Recorder, prompt: Prompt) -> tuple[float, float, float]:
    """Return the seconds of the first drafted token, of a later one, and of a later one with signals."""
    reader, policy = CachedSequence(recorder.draft, prompt, "drafter"), recorder.policy(prompt)
    plain, with_signals = (Drafter(reader, policy, needs_signals=needs, needs_q=False) for needs in (False, True))
    try:
        ids = list(prompt.ids)
        first = _block(plain, ids, 1)
        steps: dict[Drafter, list[float]] = {plain: [], with_signals: []}
        for _ in range(TIMED_STEPS):
            for drafter, times in steps.items():
                times.append(_block(drafter, ids, TIMED_STEPS))
        return first, median(steps[plain]), median(steps[with_signals])
    finally:
        reader.close()


def _block(drafter: Drafter, ids: list[int], length: int) -> float:
    """Draft a block, append it to `ids`, and return its seconds per token."""
    proposals, seconds = _time_call(lambda: drafter.draft(ids, Draft(length)))
    ids += [proposal.token for proposal in proposals]
    drafter.rollback_to(len(ids))
    return seconds / len(proposals)


def _verdicts(recorder: Recorder, prompt: Prompt, output: list[int], drafts: int) -> tuple[float, float, float]:
    """Return the seconds of a session's first verdict, of computing a later one, and of its overhead."""
    target, ids = recorder.target, list(prompt.ids)
    session = target.open(replace(prompt, cache_salt=unique_salt()), recorder.params)
    try:
        first, _ = _verdict(target, session, ids, prompt, output, drafts, 1)
        rounds = [_verdict(target, session, ids, prompt, output, drafts, n) for n in range(2, TIMED_STEPS + 2)]
    finally:
        target.close(session)
    computing = [verdict.compute_s or seconds for seconds, verdict in rounds]
    rest = [s - v.compute_s - v.queue_s if v.compute_s else 0.0 for s, v in rounds]
    return first, median(computing), max(0.0, median(rest))


def _streaming(recorder: Recorder, prompt: Prompt, length: int) -> float:
    """Return the seconds between tokens of a cloud-only stream."""
    target = recorder.target
    session = target.open(replace(prompt, cache_salt=unique_salt()), recorder.params)
    try:
        stream = target.generate(session)
        next(stream)
        tokens = max(1, min(length, STREAM_TOKENS) - 1)
        _, seconds = _time_call(lambda: [next(stream) for _ in range(tokens)])
        return seconds / tokens
    finally:
        target.close(session)


def _verdict(
    target: Verifier, session: int, ids: list[int], prompt: Prompt, output: list[int], drafts: int, round_: int
) -> tuple[float, Verdict]:
    """Verify a block of the target's earlier output, append the verdict to `ids`, and return its seconds."""
    at = len(ids) - len(prompt.ids)
    block = (output[at : at + drafts] + drafts * output[-1:])[:drafts]
    request = Verify(round_, len(ids), (), tuple(block))
    verdict, seconds = _time_call(lambda: target.verify(session, request))
    ids += [*block[: verdict.accepted], verdict.next_token]
    return seconds, verdict


def _time_call(function: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    found = function()
    return found, time.perf_counter() - started
