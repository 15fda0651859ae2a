"""Captured CUDA graphs: made when first asked for, replayed ever after, the least recently used dropped."""

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
    """Of one device. They share working memory: what one computed is valid until the next is run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: OrderedDict[Hashable, Run] = OrderedDict()
        self._can_capture = True
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Forget all: what they point to is gone."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph

    def get_or_capture(self, key: Hashable, forward: Callable[[], Run]) -> Run:
        """What runs `forward()`'s function. It reads inputs where they were at capture, and always returns the same
        tensor. Its first call, here, must do no harm with the inputs as they are."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(forward())
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _capture(self, run: Run) -> Run:
        run()  # compiles kernels, fills memos
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

        def replay(_keep_alive: Run = run) -> Tensor:  # with all that it reads
            graph.replay()
            return out

        return replay
