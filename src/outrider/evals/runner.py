"""The loop of an evaluation: every item in every mode, interleaved, with each result stored at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.errors import OutriderError
from outrider.evals.manifest import Item
from outrider.evals.modes import Inapplicable, Mode
from outrider.evals.store import TRACE, Row, Store

Tracer = Callable[[Item], Row]
WARM_UPS = 3  # items to try if a mode fails on the first
_FAILURES = (OutriderError, RuntimeError, MemoryError)  # the latter two are out-of-memory errors of torch and Python


def run(
    items: Sequence[Item],
    modes: Sequence[Mode],
    store: Store,
    tracer: Tracer | None = None,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Answer the items that the store lacks, and sort its files. A failure is stored as a result.

    tracer: records an item's trace. advance: called after each of `count_steps` steps.
    """
    warm_up(items, [mode for mode in modes if not all(store.is_done(item.id, mode.name) for item in items)])
    for n, item in enumerate(items):
        for mode in rotate_modes(modes, n):
            if not store.is_done(item.id, mode.name):
                store.add(*answer(mode, item))
            advance()
        if tracer is not None:
            if not store.is_done(item.id, TRACE):
                try:
                    trace = {**tracer(item), "id": item.id}
                except _FAILURES as error:
                    store.add({"id": item.id, "mode": TRACE, "error": _named(error)})
                else:
                    store.traces.add(trace)
            advance()
    store.finish([item.id for item in items], [mode.name for mode in modes])


def count_steps(items: Sequence[Item], modes: Sequence[Mode], tracer: Tracer | None) -> int:
    """Return the number of steps of a run, for a progress bar."""
    return len(items) * (len(modes) + (tracer is not None))


def rotate_modes(modes: Sequence[Mode], n: int) -> list[Mode]:
    """Return the order of modes for item n, so that each mode comes first equally often."""
    at = n % len(modes) if modes else 0
    return [*modes[at:], *modes[:at]]


def warm_up(items: Sequence[Item], modes: Sequence[Mode]) -> None:
    """Run each mode once without measuring, because caches and libraries are set up at their first use."""
    for mode in modes:
        for item in items[:WARM_UPS]:
            if "token_ids" in answer(mode, item)[0]:
                break


def answer(mode: Mode, item: Item) -> tuple[Row, Row | None]:
    """Return the result line of an item in a mode, and its timing if it was answered."""
    names = {"id": item.id, "mode": mode.name}
    try:
        outcome = mode.run(item)
    except Inapplicable as reason:
        return {**names, "skipped": str(reason)}, None
    except _FAILURES as error:
        return {**names, "error": _named(error)}, None
    return {**names, **outcome.result}, {**names, **outcome.timing}


def _named(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}
