"""Mutual exclusion: an engine serves one thread at a time, and one checkpoint is loaded at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from outrider.errors import StateError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Locked")

# Loading changes state of the whole process: torch's default dtype, and the initialisers that transformers replaces.
LOAD_LOCK = threading.RLock()
_locks_guard = threading.Lock()
_loaders: list[int] = []  # id of the process that loads models
_locks: WeakKeyDictionary[object, threading.RLock] = WeakKeyDictionary()


class Locked:
    """An object with `exclusive` methods, of which one runs at a time. lock: held by the running method."""

    lock: threading.RLock


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method of a `Locked` object wait until no other thread is inside one of its exclusive methods.

    In a forked child it raises StateError, before the lock, which another thread may have held at the fork.
    """

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        check_process()
        with self.lock:
            return method(self, *args, **kwargs)

    return guarded


def check_process() -> None:
    """Raise StateError in the child of a fork if a model was loaded before the fork. Otherwise keep the process's id.

    A fork copies no threads. A forward pass in the child, of a model loaded there too, would wait for those of OpenMP
    for ever, and so would anything for a lock that was held at the fork.
    """
    process = os.getpid()
    if not _loaders:
        _loaders.append(process)
    elif _loaders[0] != process:
        raise StateError(
            f"process {_loaders[0]} loaded a model before it forked this one, in which models would hang: start "
            'processes by multiprocessing.get_context("spawn"), or load models only in the child'
        )


def get_lock(shared: object) -> threading.RLock:
    """Return the lock of a loaded model (its engines share it, as a forward may keep state) or of a tokenizer."""
    check_process()
    with _locks_guard:
        return _locks.setdefault(shared, threading.RLock())
