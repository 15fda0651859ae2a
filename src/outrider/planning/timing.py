"""What a pair's steps take, by timing real ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from statistics import median
from typing import TypeVar

from outrider.config import GenerationSettings
from outrider.core.acceptance import Verdict
from outrider.core.actions import Draft, Verify
from outrider.edge.drafter import Drafter
from outrider.engines.base import Engine, Prompt, Reader
from outrider.planning.checks import count
from outrider.planning.costs import Costs, median_costs
from outrider.planning.record import Recorder
from outrider.prompts.chat import PromptLike, encode
from outrider.verifiers.base import Verifier

T = TypeVar("T")

STREAMED = 25  # tokens of a stream that are timed together
STEPS = 5  # drafted tokens that are timed together; blocks and verdicts of each kind
FEW, MANY = 1, 8  # drafts in the verdicts that are timed
LEAST = 1e-7  # s: no step takes less


def measure_costs(
    draft: Engine,
    target: Verifier,
    prompts: Seq[PromptLike],
    settings: GenerationSettings | None = None,
    *,
    repeats: int = 3,
) -> Costs:
    """Medians over prompts and repeats, of steps that are made for this alone.

    A verifier that says what its verdicts took has the rest of each answer counted as overhead: ask it across a link
    without delay, or the network is counted twice.
    """
    count(1, repeats=repeats)
    recorder = Recorder(draft, target, settings)
    encoded = [encode(draft, prompt) for prompt in prompts]
    outputs = [recorder.continuation(prompt) for prompt in encoded]  # warms up
    turns = [each for _ in range(repeats) for each in zip(encoded, outputs, strict=True)]
    return median_costs([_measure(recorder, prompt, output) for prompt, output in turns])


def _measure(recorder: Recorder, prompt: Prompt, output: list[int]) -> Costs:
    first, plain, sure = _drafting(recorder, prompt)
    opening, few, overhead = _verdicts(recorder, prompt, output, FEW)
    _, many, _ = _verdicts(recorder, prompt, output, MANY)
    slope = max(0.0, (many - few) / (MANY - FEW))
    return Costs(
        draft_s=max(plain, LEAST),
        signals_s=max(0.0, sure - plain),
        draft_prefill_s=max(0.0, first - plain),
        verify_s=max(few - FEW * slope, LEAST),
        verify_per_token_s=slope,
        verify_prefill_s=max(0.0, opening - few - overhead),
        per_round_overhead_s=overhead,
        stream_s=max(_streaming(recorder, prompt, len(output)), LEAST),
    )


def _drafting(recorder: Recorder, prompt: Prompt) -> tuple[float, float, float]:
    """Seconds of the first token, of a later one, and of a later one with its signals."""
    reader, policy = Reader(recorder.draft, prompt, "drafter"), recorder.policy(prompt)
    plain, sure = (Drafter(reader, policy, needs_signals=needs, needs_q=False) for needs in (False, True))
    try:
        ids = list(prompt.ids)
        first = _block(plain, ids, 1)
        steps: dict[Drafter, list[float]] = {plain: [], sure: []}
        for _ in range(STEPS):
            for drafter, times in steps.items():
                times.append(_block(drafter, ids, STEPS))
        return first, median(steps[plain]), median(steps[sure])
    finally:
        reader.close()


def _block(drafter: Drafter, ids: list[int], length: int) -> float:
    """Seconds per token of a block that `ids` goes on with."""
    proposals, seconds = _timed(lambda: drafter.draft(ids, Draft(length)))
    ids += [proposal.token for proposal in proposals]
    drafter.settle(len(ids))
    return seconds / len(proposals)


def _verdicts(recorder: Recorder, prompt: Prompt, output: list[int], drafts: int) -> tuple[float, float, float]:
    """Of a session with blocks of `drafts`: seconds of its first answer, of computing a later one, and of the rest."""
    target, ids = recorder.target, list(prompt.ids)
    session = target.open(prompt, recorder.conditions)
    try:
        first, _ = _verdict(target, session, ids, prompt, output, drafts, 1)
        rounds = [_verdict(target, session, ids, prompt, output, drafts, n) for n in range(2, STEPS + 2)]
    finally:
        target.close(session)
    computing = [verdict.compute_s or seconds for seconds, verdict in rounds]
    rest = [s - v.compute_s - v.queue_s if v.compute_s else 0.0 for s, v in rounds]
    return first, median(computing), max(0.0, median(rest))


def _streaming(recorder: Recorder, prompt: Prompt, length: int) -> float:
    """Seconds from token to token of the target's own stream, behind the first one."""
    target = recorder.target
    session = target.open(prompt, recorder.conditions)
    try:
        stream = target.generate(session)
        next(stream)
        tokens = max(1, min(length, STREAMED) - 1)
        _, seconds = _timed(lambda: [next(stream) for _ in range(tokens)])
        return seconds / tokens
    finally:
        target.close(session)


def _verdict(
    target: Verifier, session: int, ids: list[int], prompt: Prompt, output: list[int], drafts: int, round_: int
) -> tuple[float, Verdict]:
    """The next verdict of a session, on what the target said before; its seconds. `ids` goes on with it."""
    at = len(ids) - len(prompt.ids)
    block = (output[at : at + drafts] + drafts * output[-1:])[:drafts]
    request = Verify(round_, len(ids), (), tuple(block))
    verdict, seconds = _timed(lambda: target.verify(session, request))
    ids += [*block[: verdict.accepted], verdict.next_token]
    return seconds, verdict


def _timed(what: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    found = what()
    return found, time.perf_counter() - started
