"""Monitoring of the cloud in a thread: its name and its reachability."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress

from outrider.edge.cancellation import Cancellation
from outrider.edge.model_pair import ModelPair
from outrider.edge.prompt_reader import needs_translation
from outrider.edge.target_tokenizer import read_target_tokenizer
from outrider.engines.base import Engine
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import CloudError, CloudLost, OutriderError
from outrider.verifiers.base import ModelInfo, Verifier, disconnect

UNKNOWN_NAME = "not there yet"
CHECK_INTERVAL_S = 3.0  # s between two checks of the cloud
CONNECT_TIMEOUT_S = 3.0
RETRY_DELAY_S = 1.0  # s between two attempts, each of which lasts up to the verifier's retry timeout


class CloudMonitor:
    """The handshake with a cloud, then regular checks that it is reachable.

    engine: the edge's, or its prompt lookup. verifier: used only for the handshake, and disconnected after it. hosts:
    addresses, of which one must accept connections for the cloud to count as reachable. target_tokenizer: the cloud's.
    If it is None, it is fetched from a cloud whose tokenizer differs from the engine's.
    """

    def __init__(
        self,
        engine: Engine | PromptLookup,
        verifier: Verifier,
        hosts: Sequence[tuple[str, int]] = (),
        *,
        target_tokenizer: PromptLookup | None = None,
    ) -> None:
        self._hosts = hosts
        self._unreachable_reason: str | None = None
        self.target_tokenizer = target_tokenizer
        model = None if isinstance(engine, PromptLookup) else engine
        translates = target_tokenizer is not None and needs_translation(engine, target_tokenizer)
        reader = target_tokenizer if translates else engine
        find_reader = self._find_reader if model is not None and target_tokenizer is None else lambda _: None
        self._pair = ModelPair(
            model, verifier, "fail", reader=reader, translates=translates, find_reader=find_reader, lazy=True
        )
        self._verifier = verifier
        self._cancellation, self._closed = Cancellation(), threading.Event()
        self._attempted = threading.Event()  # the first attempt has ended
        self._outcome: Future[str] = Future()
        self._thread = threading.Thread(target=self._monitor, name="outrider-meeting", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Return the name of the cloud's model, or `UNKNOWN_NAME` before the handshake."""
        if not self._outcome.done() or self._outcome.exception() is not None:
            return UNKNOWN_NAME
        return self._outcome.result()

    @property
    def trouble(self) -> str | None:
        """Return the reason if the cloud is unreachable or incompatible, else None."""
        if not self._outcome.done():
            return "the cloud has not been reached yet"
        error = self._outcome.exception()
        return self._unreachable_reason if error is None else str(error)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the first attempt, and return whether the handshake has succeeded.

        Raises:
            OutriderError: the cloud is incompatible with this edge.
        """
        self._attempted.wait(seconds)
        if not self._outcome.done():
            return False
        self._outcome.result()
        return True

    def close(self) -> None:
        """End the checks, and wait for the thread."""
        self._closed.set()
        self._cancellation.cancel()
        self._thread.join()

    def _find_reader(self, target: ModelInfo) -> PromptLookup | None:
        self.target_tokenizer = read_target_tokenizer(target)
        return self.target_tokenizer

    def _monitor(self) -> None:
        try:
            while (name := self._attempt()) is None:
                self._attempted.set()
                if self._closed.wait(RETRY_DELAY_S):
                    raise CancelledError
            self._outcome.set_result(name)
        except (OutriderError, CancelledError) as error:
            self._outcome.set_exception(error)
        finally:
            self._attempted.set()
            with suppress(CloudError):  # the cloud may be unreachable
                disconnect(self._verifier)
        while self._hosts and not self._closed.wait(CHECK_INTERVAL_S):
            self._unreachable_reason = check_reachable(self._hosts)

    def _attempt(self) -> str | None:
        try:
            return self._pair.connect(self._cancellation).target.label
        except CloudLost:
            return None


def check_reachable(hosts: Sequence[tuple[str, int]]) -> str | None:
    """Return None if an address accepts connections, else the error of the last one."""
    reason = None
    for host, port in hosts:
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
        except (OSError, UnicodeError) as error:
            reason = f"the cloud at {host}:{port} cannot be reached: {getattr(error, 'strerror', None) or error}"
        else:
            return None
    return reason
