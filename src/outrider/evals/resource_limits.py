"""What an edge may use, held by the operating system: cores for the drafter's threads, and an address space."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engines.base import SequenceInput
from outrider.errors import SettingsError, StateError

_TASKS = Path("/proc/self/task")
_SIZE = 512  # of the matrices that wake a thread pool


def check_threads(count: int) -> None:
    """Raises SettingsError where this system cannot hold a drafter to that many cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise SettingsError(f"--edge-threads: {sys.platform} cannot hold a thread to cores")
    available = len(os.sched_getaffinity(0))
    if not 1 <= count <= available:
        raise SettingsError(f"--edge-threads {count}: between 1 and the {available} cores that this process has")


class PinnedEngine:
    """An engine that computes in a thread of its own, which, with all threads that it starts, has `threads` cores.

    The rest of the process keeps what it has. load: makes the engine, in that thread, so that an engine which counts
    threads at load counts these. affinity: what was read back from the system.

    Raises:
        SettingsError: the engine computes elsewhere than on the CPU.
        StateError: the system did not do as it was told.
    """

    def __init__(self, load: Callable[[], Any], threads: int) -> None:
        self._threads = threads
        self._cores = sorted(os.sched_getaffinity(0))[:threads]
        self._worker = ThreadPoolExecutor(1, "edge", lambda: os.sched_setaffinity(0, self._cores))
        self._engine = self._run_pinned(load)
        device = str(getattr(self._engine, "device", "cpu"))
        if not device.startswith("cpu"):
            raise SettingsError(f"--edge-threads is for an edge on the CPU; this one is on {device}")
        self.affinity = self._run_pinned(self._measure_affinity)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, slot: int, ids: Sequence[int], rows: int | None = None) -> Tensor:
        return self._run_pinned(self._engine.forward, slot, ids, rows)

    def forward_many(self, feeds: Sequence[SequenceInput]) -> list[Tensor]:
        return self._run_pinned(self._engine.forward_many, feeds)

    def _run_pinned(self, function: Callable[..., Any], *arguments: Any) -> Any:
        kept = torch.get_num_threads()
        try:
            return self._worker.submit(self._call, function, arguments).result()
        finally:
            torch.set_num_threads(kept)  # part of this number is the process's, not the thread's

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        torch.set_num_threads(self._threads)
        return function(*arguments)

    def _measure_affinity(self) -> dict[str, int]:
        """Wake the thread pool, and ask the system what its threads may use."""
        before = {task.name for task in _TASKS.iterdir()} if _TASKS.exists() else set()
        torch.ones(_SIZE, _SIZE) @ torch.ones(_SIZE, _SIZE)
        started = {task.name for task in _TASKS.iterdir()} - before if _TASKS.exists() else set()
        allowed = os.sched_getaffinity(0).union(*(_affinity(int(task)) for task in started))
        if not allowed <= set(self._cores) or torch.get_num_threads() != self._threads:
            raise StateError(f"--edge-threads {self._threads}: the drafter has cores {sorted(allowed)} after all")
        return {"cores": len(allowed), "torch_threads": torch.get_num_threads()}


def _affinity(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # it ended meanwhile
        return set()


def check_memory(*, cloud: str, device: str) -> None:
    """Raises SettingsError where a limit for the process would not be one for the edge."""
    if cloud == "local":
        raise SettingsError(
            "--edge-memory: the cloud model is in this process too, and would be limited with the edge: run it as "
            "outrider cloud and give --cloud grpc://…, or --cloud none"
        )
    if sys.platform != "linux":
        raise SettingsError(f"--edge-memory: {sys.platform} does not hold a process to an address space")
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        raise SettingsError("--edge-memory limits the CPU's memory: add --device cpu")


@contextmanager
def address_space(limit: int) -> Iterator[int]:
    """This process may map no more than `limit` bytes, libraries included; yields what was read back.

    Raises:
        SettingsError: it maps more already, or may not set this limit.
        StateError: the system did not do as it was told.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    mapped = pages * resource.getpagesize()
    if mapped >= limit:
        raise SettingsError(f"--edge-memory: {limit} bytes, but this process maps {mapped} before any model is loaded")
    kept, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError) as error:
        raise SettingsError(f"--edge-memory: {limit} bytes cannot be set: {error}") from error
    try:
        found = resource.getrlimit(resource.RLIMIT_AS)[0]
        if found != limit:
            raise StateError(f"--edge-memory: {limit} bytes were set, {found} hold")
        yield found
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (kept, hard))
