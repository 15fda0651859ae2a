"""Self-test of an engine at load: proof that its KV slots can be rolled back, and a measure of its numeric noise."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.engines.base import Engine, Prompt, SequenceInput
from outrider.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.engines.torch.kv_cache import SlotKVCache


@dataclass(frozen=True)
class SelfTest:
    """Sizes and tolerance of the self-test.

    head, tail, step: tokens fed before a roll-back, after it, and in one block. tolerance: largest allowed difference
    between logits, as a share of their standard deviation.
    """

    head: int
    tail: int
    step: int
    tolerance: float

    def ids(self, engine: Engine) -> list[int]:
        """Return arbitrary tokens for head and tail, fewer if the model's context is short.

        Raises:
            ModelError: the context is too short for the test.
        """
        head = min(self.head, (engine.max_length or self.head + self.tail) - self.tail)
        if head < self.step:
            raise ModelError(
                f"{engine.name} holds {engine.max_length} positions: expected at least {self.step + self.tail}"
            )
        return [7 * i % max(engine.vocab_size - 1, 1) for i in range(1, head + self.tail + 1)]

    def max_difference(self, engine: Engine, ids: Seq[int], reference: Tensor, kind: str) -> float:
        """Return the largest difference in logits between several ways to feed the same tokens.

        The tokens are fed in blocks after a roll-back, one at a time after another, and beside a second sequence.
        All results must agree with each other and with `reference`, float32 [len(ids), V], from one plain forward.

        Raises:
            ModelError: they differ by more than the tolerance. The message names the model and its kind.
        """
        head = len(ids) - self.tail
        slot = engine.open(Prompt(tuple(ids)))
        engine.forward(slot, [*ids[:head], *reversed(ids[head:])], 1)
        blocks = _forward_in_steps(engine, slot, ids, head, self.step)
        engine.truncate(slot, 0)
        for part in (ids[: head // 3], ids[head // 3 : head]):
            engine.forward(slot, part, 1)
        single = _forward_in_steps(engine, slot, ids, head, 1)
        batched = self._forward_beside_another(engine, slot, ids, head)
        engine.close(slot)
        tail = reference[head:]
        batched_reference = torch.cat([tail, reference[self.step : self.step + 1]])
        pairs = ((blocks, tail), (single, tail), (batched, batched_reference), (blocks, single))
        max_difference = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())
        if not max_difference <= self.tolerance * (float(tail.std()) + 1e-6):
            raise ModelError(
                f"{engine.name} ({kind}): its cache cannot be truncated: after a roll-back, or beside another slot, "
                f"its logits differ by {max_difference:.3g} from a plain forward's"
            )
        return max_difference

    def _forward_beside_another(self, engine: Engine, slot: int, ids: Seq[int], head: int) -> Tensor:
        """Roll back to the head and feed the tail in one batch with a shorter sequence. Return the logits of both."""
        engine.truncate(slot, head)
        second_slot = engine.open(Prompt(tuple(ids)))
        engine.forward(second_slot, ids[:2], 1)
        tail = ids[head:]
        rows = engine.forward_many(
            [SequenceInput(slot, tail, len(tail)), SequenceInput(second_slot, ids[2 : self.step + 1], 1)]
        )
        engine.close(second_slot)
        return torch.cat(rows)


def _forward_in_steps(engine: Engine, slot: int, ids: Seq[int], head: int, step: int) -> Tensor:
    """Roll back to the first `head` tokens and feed the rest, `step` at a time. Return their logits."""
    engine.truncate(slot, head)
    return torch.cat([engine.forward(slot, ids[i : i + step]) for i in range(head, len(ids), step)])


SELF_TESTS = {
    torch.float64: SelfTest(9, 3, 3, 1e-3),
    torch.float32: SelfTest(9, 3, 3, 1e-3),
    torch.bfloat16: SelfTest(64, 12, 3, 0.5),
    torch.float16: SelfTest(64, 12, 3, 0.2),
}


@torch.inference_mode()
def measure_fp8_noise(engine: Engine, cache: SlotKVCache, kind: str) -> float:
    """Return the numeric noise of the logits of an engine with this KV cache, which is of float8.

    Raises:
        ModelError: several ways to feed the same tokens differ by more than rounding explains.
    """
    self_test = SELF_TESTS[torch.bfloat16]
    ids = self_test.ids(engine)
    slot = engine.open(Prompt(tuple(ids)))
    whole = engine.forward(slot, ids)
    flips = _measure_flips(engine, cache, slot, ids, len(ids) - self_test.tail)
    engine.close(slot)
    return 2 * max(flips, self_test.max_difference(engine, ids, whole, kind))


def _measure_flips(engine: Engine, cache: SlotKVCache, slot: int, ids: Seq[int], head: int) -> float:
    """Return the change of the logits behind the head if one entry of each buffer moves by one step.

    Float8 has so few steps that a difference in the last bit before rounding can move an entry by one of them. Forwards
    of one token and of several differ that little even in float32. A small model seldom meets it within a short test.
    """
    engine.truncate(slot, head)
    before = engine.forward(slot, ids[head:])
    engine.truncate(slot, head)
    for buffer in cache.buffers:
        buffer[0, cache.base(slot) + head - 1, 0] ^= 1
    return float((engine.forward(slot, ids[head:]) - before).abs().max())


def check_weights(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError for an unsupported dtype, or weights that are not loaded."""
    if model.dtype not in SELF_TESTS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SELF_TESTS)
        raise ModelError(f"{name}: its weights are {str(model.dtype).removeprefix('torch.')}: expected {names}")
    if any(weight.is_meta for weight in model.parameters()):
        raise ModelError(f"{name}: its weights are not loaded (they are on the meta device)")


def explain_non_finite(model: nn.Module) -> str:
    """Return the reason for NaN or infinity in the logits of a plain forward."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            return f"its weights hold NaN or infinity, the first in {name}"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"its logits hold NaN or infinity, though its weights do not: they overflow in {dtype}; try another dtype"
