"""Monitoring of the cloud in a thread: its name, its reachability and its model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress

from outrider.edge.cancellation import Cancellation
from outrider.edge.model_pair import ModelPair
from outrider.edge.prompt_reader import needs_translation
from outrider.edge.target_tokenizer import read_target_tokenizer
from outrider.engines.base import Engine
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import CloudError, CloudLost, OutriderError
from outrider.verifiers.base import Connectable, ModelInfo, Verifier, disconnect

UNKNOWN_NAME = "not there yet"
NOT_REACHED = "the cloud has not been reached yet"
CHECK_INTERVAL_S = 3.0  # s between two checks of the cloud
CONNECT_TIMEOUT_S = 3.0
RETRY_DELAY_S = 1.0  # s between two handshakes, each of which lasts up to the verifier's retry timeout
REFUSED_DELAY_S = 30.0  # s after a cloud that does not fit, because a handshake may read its vocabulary


class CloudMonitor:
    """The handshake with a cloud, then regular checks that it is reachable and still has the same model.

    engine: the edge's, or its prompt lookup. verifier: used for the handshake and the checks alone, and disconnected at
    the end. hosts: addresses, of which one must accept connections for the cloud to count as reachable.
    target_tokenizer: the cloud's. If it is None, it is fetched from a cloud whose tokenizer differs from the engine's.

    name: of the cloud's model, or `UNKNOWN_NAME` before the handshake. trouble: the reason if the cloud is unreachable,
    incompatible, or has another model than at the handshake, else None.
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
        self.target_tokenizer = target_tokenizer
        model = None if isinstance(engine, PromptLookup) else engine
        translates = target_tokenizer is not None and needs_translation(engine, target_tokenizer)
        reader = target_tokenizer if translates else engine
        find_reader = self._find_reader if model is not None and target_tokenizer is None else lambda _: None
        self._pair = ModelPair(
            model, verifier, "fail", reader=reader, translates=translates, find_reader=find_reader, lazy=True
        )
        self._verifier = verifier
        self.name = UNKNOWN_NAME
        self.trouble: str | None = NOT_REACHED
        self._refusal: OutriderError | None = None  # of the last handshake
        self._cancellation, self._closed = Cancellation(), threading.Event()
        self._attempted = threading.Event()  # the first attempt has ended
        self._thread = threading.Thread(target=self._monitor, name="outrider-meeting", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int | None:
        """The most positions of prompt and output that edge and cloud hold, as far as known. None without a limit."""
        return self._pair.state.max_length

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the first attempt, and return whether the handshake has succeeded.

        Raises:
            OutriderError: the cloud is incompatible with this edge.
        """
        self._attempted.wait(seconds)
        if self._refusal is not None:
            raise self._refusal
        return self.name != UNKNOWN_NAME

    def close(self) -> None:
        """End the checks, and wait for the thread."""
        self._closed.set()
        self._cancellation.cancel()
        with suppress(CloudError):  # the cloud may be unreachable
            disconnect(self._verifier)  # ends a check that waits for the cloud
        self._thread.join()

    def _find_reader(self, target: ModelInfo) -> PromptLookup | None:
        self.target_tokenizer = read_target_tokenizer(target)
        return self.target_tokenizer

    def _monitor(self) -> None:
        delay = 0.0
        while not self._closed.wait(delay):
            delay = self._check() if self._pair.state.is_complete else self._attempt()
            self._attempted.set()

    def _attempt(self) -> float:
        """Attempt the handshake, and return the seconds until the next attempt or check."""
        self._refusal = None
        try:
            self.name = self._pair.connect(self._cancellation).target.label
        except (CloudLost, CancelledError):
            self.trouble = NOT_REACHED
            return RETRY_DELAY_S
        except OutriderError as error:
            self._refusal, self.trouble = error, str(error)
            return REFUSED_DELAY_S
        self.trouble = None
        return CHECK_INTERVAL_S

    def _check(self) -> float:
        """Check the cloud, and return the seconds until the next check."""
        trouble = check_reachable(self._hosts)
        if trouble is None and isinstance(self._verifier, Connectable):
            try:
                self._verifier.probe()
            except OutriderError as error:
                trouble = str(error)
        self.trouble = trouble
        return CHECK_INTERVAL_S


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
