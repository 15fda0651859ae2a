"""Mutual exclusion: an engine serves one thread at a time, and one checkpoint is loaded at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Locked")

# Loading changes state of the whole process: torch's default dtype, and the initialisers that transformers replaces.
LOADING = threading.RLock()
_guard = threading.Lock()
_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


class Locked:
    """An object whose `exclusive` methods run in one thread at a time. lock: held by the running method."""

    lock: threading.RLock


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method of a `Locked` object wait until no other thread is inside one of its exclusive methods."""

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return guarded


def lock_of(shared: Any) -> threading.RLock:
    """Return the lock of a loaded model (its engines share it, as a forward may keep state) or of a tokenizer."""
    with _guard:
        return _locks.setdefault(shared, threading.RLock())
