"""Cache of CUDA graphs: captured at their second use, replayed afterwards, and evicted when least recently used.

At the first use kernels are launched one by one: a capture takes three times as long, and most prompts have a length
that does not come again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

MAX_GRAPHS = 64
log = logging.getLogger(__name__)

Run = Callable[[], Tensor]


class CudaGraphCache:
    """CUDA graphs of one device. They share a memory pool: a graph's output is valid until the next graph runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: OrderedDict[Hashable, Run] = OrderedDict()
        self._used_once: set[Hashable] = set()
        self._can_capture = True
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, as the buffers that they read are gone."""
        if self._graphs:
            torch.cuda.synchronize(self._device)  # one may still run
        self._graphs.clear()
        self._used_once.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool is freed with its last graph

    def get_or_capture(self, key: Hashable, forward: Callable[[], Run]) -> Run:
        """Return the function that `forward()` returns, captured if the key is used for the second time.

        The captured function reads its inputs at the addresses of the capture, and always returns the same tensor. The
        capture runs it once, which must do no harm with the inputs as they are.
        """
        if key not in self._graphs:
            if key not in self._used_once:
                self._used_once.add(key)
                return forward()
            self._graphs[key] = self._capture(forward())
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _capture(self, run: Run) -> Run:
        run()  # compiles kernels and fills caches, which a capture cannot
        if not self._can_capture:
            return run
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                out = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning(
                "CUDA graphs cannot be captured here: kernels are launched one by one, which is slower (%s)", error
            )
            self._can_capture = False
            return run

        def replay(_keep_alive: Run = run) -> Tensor:  # the graph reads tensors that `run` holds
            graph.replay()
            return out

        return replay
