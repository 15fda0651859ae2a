"""The scheduler's policy, without threads: padding stays bounded, nothing is passed over, chunks cover a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.scheduler import (
    FREE_PADDING_TOKENS,
    SHORT_BLOCK_TOKENS,
    Batch,
    Request,
    Scheduler,
    batch_with_first,
    group_by_width,
    may_pad_together,
    next_chunk_size,
)

widths = st.lists(st.integers(1, 96), max_size=30)


def width_of(item: tuple[int, int]) -> int:
    return item[1]


@pytest.mark.parametrize(
    ("narrowest", "widest", "allowed"),
    [(1, FREE_PADDING_TOKENS, True), (1, FREE_PADDING_TOKENS + 1, False), (20, 40, True), (20, 41, False)],
)
def test_padding_is_at_most_double_or_free(narrowest: int, widest: int, allowed: bool) -> None:
    assert may_pad_together(narrowest, widest) is allowed


@given(widths, st.integers(1, 8))
def test_groups_hold_every_item_once_and_limit_size_and_padding(widths: list[int], limit: int) -> None:
    items = list(enumerate(widths))
    groups = group_by_width(items, width_of, limit)
    assert sorted(item for group in groups for item in group) == items
    for group in groups:
        assert len(group) <= limit
        assert may_pad_together(min(map(width_of, group)), max(map(width_of, group)))


@given(widths.filter(bool), st.integers(1, 8), st.integers(1, 200))
def test_batch_starts_with_the_first_item_and_keeps_the_order(widths: list[int], limit: int, max_tokens: int) -> None:
    items = list(enumerate(widths))
    batch = batch_with_first(items, width_of, limit=limit, max_tokens=max_tokens)
    assert batch[0] == items[0]
    assert batch == sorted(batch)
    assert len(batch) <= limit
    assert len(batch) == 1 or sum(map(width_of, batch)) <= max_tokens
    assert may_pad_together(min(map(width_of, batch)), max(map(width_of, batch)))


def test_batch_skips_an_item_that_is_too_wide_and_takes_a_later_one() -> None:
    assert batch_with_first([2, 90, 3], lambda item: item, limit=8, max_tokens=256) == [2, 3]


@given(st.integers(1, 2000), st.integers(1, 300), st.data())
def test_chunks_cover_the_prompt_and_the_last_one_holds_the_logits(total: int, chunk: int, data: st.DataObject) -> None:
    logits_to_keep = data.draw(st.integers(1, total))
    remaining, sizes = total, []
    while remaining:
        sizes.append(next_chunk_size(remaining, chunk, logits_to_keep))
        remaining -= sizes[-1]
    assert sum(sizes) == total
    assert sizes[-1] >= logits_to_keep
    assert all(0 < size <= chunk for size in sizes[:-1])
    assert sizes[-1] <= max(chunk, logits_to_keep)


class Tokens(Request):
    """A request for `count` tokens of an identity, of which the last needs logits."""

    logits_to_keep = 1

    def __init__(self, count: int, identity: str = "", admitted: float | None = None, slot: int = 0) -> None:
        self.ids, self.identity, self.admitted, self.slot = range(count), identity, admitted, slot


def scheduler(*requests: Tokens, chunk: int = 256) -> Scheduler[Tokens]:
    made: Scheduler[Tokens] = Scheduler(chunk=chunk, max_batch=8)
    made.requests += requests
    return made


@given(st.lists(st.integers(1, 700), min_size=1, max_size=20))
def test_every_batch_has_the_oldest_request_and_all_are_computed_to_their_end(counts: list[int]) -> None:
    requests = [Tokens(count) for count in counts]
    queue, done = scheduler(*requests), dict.fromkeys(requests, 0)
    while queue.requests:
        oldest = queue.requests[0]
        batch = queue.next_batch()
        assert batch.requests[0] is oldest
        assert len(batch.requests) <= 8
        assert sum(batch.counts) <= 256
        for request, part in zip(batch.requests, batch.inputs, strict=True):
            done[request] += len(part.ids)
            request.ids = request.ids[len(part.ids) :]
            if request.ids:
                queue.requests.append(request)
    assert list(done.values()) == counts


def test_the_requests_of_a_failed_batch_run_first_and_alone() -> None:
    requests = [Tokens(2) for _ in range(4)]
    queue = scheduler(*requests[:3])
    failed = queue.next_batch()
    queue.requests.append(requests[3])
    queue.isolate(failed)
    assert [queue.next_batch().requests for _ in range(4)] == [[request] for request in requests]


def test_a_step_has_every_short_request_and_one_chunk_of_the_long_ones() -> None:
    short = [Tokens(count, admitted=0.0) for count in (90, 2, 5)]
    long = [Tokens(count, admitted=0.0) for count in (600, 700, 800)]
    step = scheduler(*long, *short, Tokens(3)).plan_step()
    assert step == [
        Batch([short[1], short[2]], [2, 5]),
        Batch([short[0]], [90]),
        Batch(long[:2], [128, 128], is_prefill=True),
    ]


def test_a_batch_that_the_host_can_overlap_with_itself_is_halved() -> None:
    requests = [Tokens(count, admitted=0.0) for count in (4, 4, 4, 4, 4)]
    halved: Scheduler[Tokens] = Scheduler(overlap_tokens=16)
    halved.requests = list(requests)
    assert halved.plan_step() == [Batch(requests[:3], [4, 4, 4]), Batch(requests[3:], [4, 4])]
    halved.requests = requests[:4]
    assert halved.plan_step() == [Batch(requests[:4], [4] * 4)]
    halved.requests = [Tokens(20, admitted=0.0)]
    assert len(halved.plan_step()) == 1
    assert scheduler(*requests).plan_step() == [Batch(requests, [4] * 5)]


def test_a_request_in_flight_is_launched_again_unless_another_waits_for_a_slot() -> None:
    flying, other = Tokens(1, admitted=0.0), Tokens(1, admitted=0.0)
    flying.in_flight = 1
    assert [batch.requests for batch in scheduler(flying, other).plan_step()] == [[flying, other]]
    assert [batch.requests for batch in scheduler(flying, other, Tokens(1)).plan_step()] == [[other]]


def test_a_request_without_tokens_to_append_is_in_no_batch() -> None:
    assert scheduler(Tokens(0, admitted=0.0)).plan_step() == []


def test_slots_go_round_robin_over_identities() -> None:
    requests = [Tokens(1, "a"), Tokens(1, "a"), Tokens(1, "b")]
    assert scheduler(*requests).admit(2, ()) == ([requests[0], requests[2]], None)


def test_the_latest_long_prefill_of_the_largest_identity_is_preempted() -> None:
    running = [Tokens(300, "a", admitted=float(n)) for n in range(2)]
    short = Tokens(SHORT_BLOCK_TOKENS, "a", admitted=9.0)
    newcomer = Tokens(1, "b")
    queue = scheduler(*running, short, newcomer)
    assert queue.admit(3, ()) == ([newcomer], running[1])
    assert queue.waiting == [running[1], newcomer]
    assert scheduler(running[0], newcomer).admit(1, ()) == ([], None), "b would have as many as a"


def test_an_identity_in_debt_prefills_after_the_others_have_used_as_much() -> None:
    request = Tokens(300, "a", admitted=0.0)
    queue = scheduler(request, Tokens(1, "b", admitted=0.0))
    queue.record_batch(Batch([request], [256], is_prefill=True), 2.0)
    queue.end_step()
    assert [batch.is_prefill for batch in queue.plan_step()] == [False]
    queue.record("b", 2.0, heavy=False)
    queue.end_step()
    assert [batch.is_prefill for batch in queue.plan_step()] == [False, True]
