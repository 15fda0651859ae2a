"""Which functions are captured, and when, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.engines.torch import cuda_graphs
from outrider.engines.torch.cuda_graphs import CudaGraphCache, Run


class Uncaptured(CudaGraphCache):
    """Notes what a GPU would capture. captured: one entry per capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        super().__init__(torch.device("cpu"))
        self.captured: list[Run] = []

    def _capture(self, run: Run) -> Run:
        self.captured.append(run)
        return run


def function() -> Tensor:
    return torch.zeros(1)


def test_a_key_is_captured_at_its_second_use_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Uncaptured(monkeypatch)
    assert graphs.get_or_capture("a", lambda: function) is function
    assert not graphs.captured
    graphs.get_or_capture("b", lambda: function)
    second = graphs.get_or_capture("a", lambda: function)
    assert graphs.captured == [function]
    assert graphs.get_or_capture("a", lambda: pytest.fail("made again")) is second
    graphs.clear()  # a key is new again then
    graphs.get_or_capture("a", lambda: function)
    assert len(graphs.captured) == 1


def test_the_graph_used_longest_ago_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    graphs = Uncaptured(monkeypatch)
    for key in "aabbacc":  # c takes the place of b
        graphs.get_or_capture(key, lambda: function)
    assert len(graphs.captured) == 3
    graphs.get_or_capture("a", lambda: pytest.fail("made again"))
    graphs.get_or_capture("b", lambda: function)
    assert len(graphs.captured) == 4
