"""Operations on one row of logits (float32 [V]) whose cost matters at V = 150,000.

On a CPU, numpy's vectorised argmax takes 0.02 ms and torch.argmax 0.3 ms, and numpy's copy wakes no thread pool. On
other devices the rows stay on the device. Both return the first of equal maxima.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def argmax(logits: Tensor) -> int:
    """Return the index of the largest entry."""
    return int(logits.numpy().argmax()) if logits.device.type == "cpu" else int(torch.argmax(logits))


def clone_logits(logits: Tensor) -> Tensor:
    """Return a writable copy."""
    return torch.from_numpy(logits.numpy().copy()) if logits.device.type == "cpu" else logits.clone()


def gather_logits(logits: Tensor, indices: np.ndarray) -> np.ndarray:
    """Return the entries at `indices` (int64), float32."""
    if logits.device.type == "cpu":
        return logits.numpy()[indices]
    return logits[torch.from_numpy(indices).to(logits.device)].cpu().numpy()


def scatter_logits(logits: Tensor, indices: np.ndarray, values: np.ndarray | float) -> None:
    """Write `values` at `indices` (int64)."""
    if logits.device.type == "cpu":
        logits.numpy()[indices] = values
    else:
        logits[torch.from_numpy(indices).to(logits.device)] = torch.as_tensor(
            values, dtype=logits.dtype, device=logits.device
        )


def ban_others(logits: Tensor, allowed: np.ndarray) -> None:
    """Write −inf at all entries that are not allowed. allowed: bool [≤ V]."""
    if logits.device.type == "cpu":
        values = logits.numpy()
        values[len(allowed) :] = -np.inf
        np.copyto(values[: len(allowed)], -np.inf, where=~allowed)
    else:
        kept = torch.from_numpy(allowed).to(logits.device)
        logits[len(allowed) :] = -torch.inf
        logits[: len(allowed)].masked_fill_(~kept, -torch.inf)


def top2_margin(logits: Tensor) -> float:
    """Return the difference of the two largest entries, infinite for a single entry."""
    if logits.shape[-1] < 2:
        return float("inf")
    if logits.device.type != "cpu":
        first, second = torch.topk(logits, 2).values.tolist()
        return float(first - second)
    values = logits.numpy()
    best = int(values.argmax())
    others = [part.max() for part in (values[:best], values[best + 1 :]) if len(part)]
    return float(values[best] - np.max(others))
