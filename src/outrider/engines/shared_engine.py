"""One engine for many threads, with leader-follower batching.

If no thread leads, a caller does, and runs its own input. Otherwise it gives its input to the scheduler and waits
until another thread has computed its logits, or until it becomes the leader, as the one that has waited longest. The
leader runs the scheduler's next batch, which has its own input. So calls are served in order of arrival, there is no
extra thread, and a lone caller pays for uncontended locks alone.

A long prompt goes back to the end of the queue after each chunk, so that short steps come in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, cast

from torch import Tensor

from outrider.decoding.actions import Proposal
from outrider.engines.base import (
    DeviceSampler,
    Engine,
    Prompt,
    SequenceInput,
    SlotReuse,
    as_slot_reuse,
    check_inputs,
    check_truncation,
    forward_or_sample,
)
from outrider.engines.prefix_cache import PrefixCache
from outrider.engines.scheduler import Batch, Request, Scheduler, prefill_chunk
from outrider.errors import StateError
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import SampledToken

_SHARING = threading.Lock()  # guards the attribute `shared` of engines


class _Call(Request):
    """A caller that waits for its turn. do: engine call that runs alone, in place of a forward."""

    result: Any

    def __init__(self, do: Callable[[], Any] | None = None) -> None:
        self.do, self.alone = do, do is not None
        self.policy: Policy | None = None
        self._is_leader = False
        self._signal = threading.Lock()
        self._signal.acquire()

    @classmethod
    def forward(cls, seq_input: SequenceInput, policy: Policy | None) -> _Call:
        """Return a call for a forward. policy: samples its tokens on the device."""
        call = cls()
        call.slot, call.ids, call.logits_to_keep = seq_input.slot, seq_input.ids, seq_input.logits_to_keep
        call.policy = policy
        return call

    def grant_turn(self) -> None:
        """Make the waiting caller the leader."""
        self._is_leader = True
        self._signal.release()

    def complete(self, result: Any) -> None:
        """Give the waiting caller its result."""
        self.result, self._is_leader = result, False
        self._signal.release()

    def wait_for_turn(self) -> bool:
        """Wait, and return whether this caller is the leader. Otherwise the result is there."""
        self._signal.acquire()
        return self._is_leader


class SharedEngine:
    """An `Engine`, and a `DeviceSampler` if the engine is one, for any number of threads at once.

    A slot belongs to one thread at a time. `truncate` and `kv_len` never wait: the engine's slot is rolled back before
    its next forward. Other attributes of the engine are passed through, without a lock.
    """

    serves_threads = True  # a decoder then accepts generations of several threads at once

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # guards _scheduler and _busy
        self._scheduler: Scheduler[_Call] = Scheduler(chunk=prefill_chunk(engine))
        self._busy = False
        self._lengths: dict[int, int] = {}  # cached tokens of each open slot, for its owner
        self.prefix_cache = PrefixCache() if as_slot_reuse(engine) is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # Slots --------------------------------------------------------------------------------------------------

    def open(self, prompt: Prompt) -> int:
        """Open a slot for a prompt, in a turn of its own."""
        slot: int = self._submit(_Call(lambda: self._engine.open(prompt)))
        self._lengths[slot] = 0
        return slot

    def reopen(self, slot: int, prompt: Prompt) -> None:
        """Let a slot continue with another prompt, in a turn of its own."""
        engine = cast(SlotReuse, self._engine)

        def reopen() -> None:
            self._sync_slot(slot)
            engine.reopen(slot, prompt)

        self._submit(_Call(reopen))

    def close(self, slot: int) -> None:
        """Close a slot, in a turn of its own."""
        self.kv_len(slot)
        del self._lengths[slot]
        self._submit(_Call(lambda: self._engine.close(slot)))

    def kv_len(self, slot: int) -> int:
        """Return the number of cached tokens of a slot."""
        if slot not in self._lengths:
            raise StateError(f"slot {slot} is not open")
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Roll a slot back to `length` cached tokens."""
        check_truncation(slot, length, self.kv_len(slot))
        self._lengths[slot] = length

    # Forwards -----------------------------------------------------------------------------------------------

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        """Append tokens to a slot, and return the logits of the last `rows` positions: float32 [rows, V]."""
        return cast(Tensor, self._run(SequenceInput(slot, ids, len(ids) if rows is None else rows)))

    def forward_many(self, inputs: Seq[SequenceInput]) -> list[Tensor]:
        """Run the inputs one after another. Only inputs of different threads are batched."""
        check_inputs(inputs)
        return [cast(Tensor, self._run(seq_input)) for seq_input in inputs]

    def sample_many(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> list[list[SampledToken]]:
        """Run the inputs one after another, and return the tokens that the policies sample on the device."""
        check_inputs(inputs)
        return [
            cast("list[SampledToken]", self._run(seq_input, policy))
            for seq_input, policy in zip(inputs, policies, strict=True)
        ]

    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, with_signals: bool) -> list[Proposal]:
        """Draft a block on the device, in a turn of its own."""
        engine = cast(DeviceSampler, self._engine)
        rest = (len(ids) - 1) % prefill_chunk(engine) + 1
        if len(ids) > rest:
            self._run(SequenceInput(slot, ids[:-rest], 1))

        def draft() -> list[Proposal]:
            self._sync_slot(slot)
            drafted = engine.draft(slot, ids[-rest:], count, policy, with_signals=with_signals)
            self._lengths[slot] = engine.kv_len(slot)
            return drafted

        return cast("list[Proposal]", self._submit(_Call(draft)))

    def _run(self, seq_input: SequenceInput, policy: Policy | None = None) -> Any:
        """Return an input's logits, or the tokens that the policy samples. After a failure the slot is unchanged."""
        check_inputs([seq_input])
        before = self.kv_len(seq_input.slot)
        try:
            return self._submit(_Call.forward(seq_input, policy))
        except BaseException:
            self._lengths[seq_input.slot] = before
            raise

    def _sync_slot(self, slot: int) -> None:
        """Roll the engine's slot back to its owner's length, after `truncate` or a failed forward."""
        length = self._lengths[slot]
        if self._engine.kv_len(slot) > length:
            self._engine.truncate(slot, length)

    # Turns --------------------------------------------------------------------------------------------------

    def _submit(self, call: _Call) -> Any:
        with self._lock:
            leads, self._busy = not self._busy, True
            if not leads:
                self._scheduler.requests.append(call)
        if leads:
            self._lead(self._scheduler.batch([call]))
        while call.wait_for_turn():
            with self._lock:
                batch = self._scheduler.next_batch()
            self._lead(batch)
        return call.result

    def _lead(self, batch: Batch[_Call]) -> None:
        """Run a batch, of which this thread's call is the first, and pass the leadership on."""
        try:
            self._run_batch(batch)
        finally:
            with self._lock:
                if self._scheduler.requests:
                    self._scheduler.requests[0].grant_turn()
                else:
                    self._busy = False

    def _run_batch(self, batch: Batch[_Call]) -> None:
        """Run a batch. Calls with further chunks go to the end of the queue, those of a failed batch to its head."""
        try:
            outputs = self._execute(batch)
        except Exception:  # each call of a batch then runs alone, and raises its own error there
            if len(batch.requests) == 1:
                raise
            with self._lock:
                self._scheduler.isolate(batch)
            return
        for call, count, output in zip(batch.requests, batch.counts, outputs, strict=True):
            if call.remaining == count:
                call.complete(output)
            else:
                call.ids, call.alone = call.ids[count:], False
                with self._lock:
                    self._scheduler.requests.append(call)

    def _execute(self, batch: Batch[_Call]) -> Seq[Any]:
        if (do := batch.requests[0].do) is not None:
            return [do()]
        inputs = batch.inputs
        for seq_input in inputs:
            self._sync_slot(seq_input.slot)
        policies = [
            call.policy if call.remaining == count else None
            for call, count in zip(batch.requests, batch.counts, strict=True)
        ]
        outputs = forward_or_sample(self._engine, inputs, policies)
        for seq_input in inputs:
            self._lengths[seq_input.slot] += len(seq_input.ids)
        return outputs


def share(engine: Engine) -> Engine:
    """Return the engine for any number of threads, the same object for each call.

    The sequences that the engine has kept are closed, as its `SharedEngine` keeps its own.
    """
    if getattr(engine, "serves_threads", False):
        return engine
    with _SHARING:
        shared: SharedEngine | None = vars(engine).get("shared")
        if shared is None:
            if (reuse := as_slot_reuse(engine)) is not None:
                reuse.prefix_cache.clear(engine)
            shared = vars(engine)["shared"] = SharedEngine(engine)
    return shared
