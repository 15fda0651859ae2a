"""A few operations on rows of logits (float32 [V]) whose cost is felt at V = 150,000.

On a CPU, numpy's vectorised argmax takes 0.02 ms where torch.argmax takes 0.3, and its copy does not wake a thread
pool; on other devices the rows stay where they are. Both give the first of equal maxima.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def best(row: Tensor) -> int:
    """The index of the largest entry."""
    return int(row.numpy().argmax()) if row.device.type == "cpu" else int(torch.argmax(row))


def copy(row: Tensor) -> Tensor:
    """A copy that may be written to."""
    return torch.from_numpy(row.numpy().copy()) if row.device.type == "cpu" else row.clone()


def take(row: Tensor, at: np.ndarray) -> np.ndarray:
    """The entries at the indices `at` (int64), float32."""
    if row.device.type == "cpu":
        return row.numpy()[at]
    return row[torch.from_numpy(at).to(row.device)].cpu().numpy()


def put(row: Tensor, at: np.ndarray, values: np.ndarray | float) -> None:
    """Write `values` at the indices `at`."""
    if row.device.type == "cpu":
        row.numpy()[at] = values
    else:
        row[torch.from_numpy(at).to(row.device)] = torch.as_tensor(values, dtype=row.dtype, device=row.device)


def lead(row: Tensor) -> float:
    """By how much the largest entry exceeds the next one; infinite for a single entry."""
    if row.shape[-1] < 2:
        return float("inf")
    if row.device.type != "cpu":
        first, second = torch.topk(row, 2).values.tolist()
        return float(first - second)
    values = row.numpy()
    at = int(values.argmax())
    others = [part.max() for part in (values[:at], values[at + 1 :]) if len(part)]
    return float(values[at] - np.max(others))
