"""One engine for many threads, with leader-follower batching.

A caller appends its input to a list. If no thread leads, the caller does. Otherwise it waits until another thread has
computed its logits, or until it becomes the leader, as the one that has waited longest. The leader runs its own input,
and in the same forward the inputs on the list that fit with it. So calls are served in order of arrival, there is no
extra thread, and a lone caller pays for two uncontended locks.

Long prompts are prefilled in chunks, each with a turn of its own, so that short steps come in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar, cast

from torch import Tensor

from outrider.decoding.actions import Proposal
from outrider.engines.base import (
    DeviceSampler,
    Engine,
    Prompt,
    SequenceInput,
    check_inputs,
    check_truncation,
    forward_or_sample,
)
from outrider.engines.batching import PREFILL_CHUNK, batch_with_first, next_chunk_size
from outrider.errors import StateError
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import SampledToken

T = TypeVar("T")

MAX_BATCH = 64  # inputs in one forward


class _Call:
    """A waiting call of the engine, which runs alone."""

    result: Any
    width = 0
    alone = True

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do
        self._is_leader = False
        self._signal = threading.Lock()
        self._signal.acquire()

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


class _ForwardCall(_Call):
    """A waiting forward, which may be batched with others until a batch has failed. policy: samples on the device."""

    alone = False

    def __init__(self, seq_input: SequenceInput, policy: Policy | None, do: Callable[[], Any]) -> None:
        super().__init__(do)
        self.input, self.policy, self.width = seq_input, policy, len(seq_input.ids)


class SharedEngine:
    """An `Engine`, and a `DeviceSampler` if the engine is one, for any number of threads at once.

    A slot belongs to one thread at a time. `truncate` and `kv_len` never wait: the engine's slot is rolled back before
    its next forward. Other attributes of the engine are passed through, without a lock.
    """

    serves_threads = True  # a decoder then accepts generations of several threads at once

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # guards _waiting and _busy
        self._waiting: list[_Call] = []
        self._busy = False
        self._lengths: dict[int, int] = {}  # cached tokens of each open slot, for its owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # Slots --------------------------------------------------------------------------------------------------

    def open(self, prompt: Prompt) -> int:
        """Open a slot for a prompt, in a turn of its own."""
        slot: int = self._submit(_Call(lambda: self._engine.open(prompt)))
        self._lengths[slot] = 0
        return slot

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
        rest, engine = self._prefill_chunks(SequenceInput(slot, ids, 1)), cast(DeviceSampler, self._engine)

        def draft() -> list[Proposal]:
            self._sync_slot(slot)
            drafted = engine.draft(slot, rest.ids, count, policy, with_signals=with_signals)
            self._lengths[slot] = engine.kv_len(slot)
            return drafted

        return cast("list[Proposal]", self._submit(_Call(draft)))

    def _run(self, seq_input: SequenceInput, policy: Policy | None = None) -> Any:
        """Return an input's logits, or the tokens that the policy samples. After a failure the slot is unchanged."""
        check_inputs([seq_input])
        before = self.kv_len(seq_input.slot)
        try:
            return self._submit(self._forward_call(self._prefill_chunks(seq_input), policy))
        except BaseException:
            self._lengths[seq_input.slot] = before
            raise

    def _prefill_chunks(self, seq_input: SequenceInput) -> SequenceInput:
        """Prefill a long input in chunks up to its last part, which has all requested logits. Return that part."""
        ids = seq_input.ids
        while (part := next_chunk_size(len(ids), PREFILL_CHUNK, seq_input.logits_to_keep)) < len(ids):
            self._submit(self._forward_call(SequenceInput(seq_input.slot, ids[:part], 1), None))
            ids = ids[part:]
        return SequenceInput(seq_input.slot, ids, seq_input.logits_to_keep)

    def _forward_call(self, seq_input: SequenceInput, policy: Policy | None) -> _ForwardCall:
        call = _ForwardCall(seq_input, policy, lambda: self._forward_calls([call])[0])
        return call

    def _forward_calls(self, calls: Seq[_ForwardCall]) -> Seq[Any]:
        inputs = [call.input for call in calls]
        for seq_input in inputs:
            self._sync_slot(seq_input.slot)
        if any(call.policy is not None for call in calls):
            outputs: Seq[Any] = forward_or_sample(self._engine, inputs, [call.policy for call in calls])
        else:
            outputs = self._engine.forward_many(inputs)
        for seq_input in inputs:
            self._lengths[seq_input.slot] += len(seq_input.ids)
        return outputs

    def _sync_slot(self, slot: int) -> None:
        """Roll the engine's slot back to its owner's length, after `truncate` or a failed forward."""
        length = self._lengths[slot]
        if self._engine.kv_len(slot) > length:
            self._engine.truncate(slot, length)

    # Turns --------------------------------------------------------------------------------------------------

    def _submit(self, call: _Call) -> Any:
        with self._lock:
            must_wait, self._busy = self._busy, True
            if must_wait:
                self._waiting.append(call)
        if not must_wait:
            return self._run_alone(call)
        while call.wait_for_turn():
            self._lead()
        return call.result

    def _run_alone(self, call: _Call) -> Any:
        try:
            return call.do()
        finally:
            self._pass_leadership()

    def _lead(self) -> None:
        """Run the call that has waited longest, which is this thread's, and those that fit into its batch."""
        group = self._take_group()
        if len(group) == 1:
            group[0].complete(self._run_alone(group[0]))
            return
        try:
            self._run_group(group)
        finally:
            self._pass_leadership()

    def _run_group(self, group: list[_ForwardCall]) -> None:
        try:
            results = self._forward_calls(group)
        except Exception:  # noqa: BLE001 - each call then runs alone, and raises its own error there
            self._isolate(group)
        else:
            for call, result in zip(group, results, strict=True):
                call.complete(result)

    def _take_group(self) -> list[Any]:
        """Remove the oldest call from the queue, with the later ones that fit in its forward, and return them."""
        with self._lock:
            first, rest = self._waiting[0], self._waiting[1:]
            candidates = [first] if first.alone else [first, *(call for call in rest if not call.alone)]
            group = batch_with_first(candidates, lambda call: call.width, limit=MAX_BATCH, max_tokens=PREFILL_CHUNK)
            selected = set(group)
            self._waiting = [call for call in rest if call not in selected]
        return group

    def _isolate(self, group: Seq[_ForwardCall]) -> None:
        with self._lock:
            for call in group:
                call.alone = True
            self._waiting = [*group, *self._waiting]

    def _pass_leadership(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting[0].grant_turn()
            else:
                self._busy = False
