"""Mutual exclusion: an engine serves one thread at a time, and one checkpoint is loaded at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from weakref import WeakKeyDictionary

from outrider.errors import StateError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Locked")

# Loading changes state of the whole process: torch's default dtype, and the initialisers that transformers replaces.
LOADING = threading.RLock()
_guard = threading.Lock()
_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


class Locked:
    """An object whose `exclusive` methods run in one thread at a time, in the process that made the object.

    lock: held by the running method. process: the id of that process.
    """

    lock: threading.RLock
    process: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.process = os.getpid()
        return made


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method of a `Locked` object wait until no other thread is inside one of its exclusive methods.

    After a fork it raises StateError. The check precedes the lock, which another thread may have held at the fork.
    """

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        check_process(self.process)
        with self.lock:
            return method(self, *args, **kwargs)

    return guarded


def check_process(process: int) -> None:
    """Raise StateError in a forked child.

    A fork copies neither the threads of the model library, for which a forward pass would wait, nor the release of
    locks that were held at that moment.
    """
    if os.getpid() != process:
        raise StateError(
            f"this engine was loaded in process {process}, which has forked since: its threads do not exist in the "
            'child. Load the model in the child, or start processes with multiprocessing.get_context("spawn")'
        )


def lock_of(shared: Any) -> threading.RLock:
    """Return the lock of a loaded model (its engines share it, as a forward may keep state) or of a tokenizer."""
    with _guard:
        return _locks.setdefault(shared, threading.RLock())
