"""What the edge makes of a cloud's no: whether trying again may help, and which of our errors it is."""

from __future__ import annotations

from outrider.errors import (
    CloudRefused,
    DecodingError,
    OutriderError,
    PromptError,
    SettingsError,
    StateError,
    VocabularyMismatch,
)
from outrider.wire import schema
from outrider.wire.messages import Code
from outrider.wire.status import CallFailed, Disconnected, NotGrpc, Status, Untrusted

_TYPES: dict[int, type[OutriderError]] = {
    Code.VOCABULARY: VocabularyMismatch,
    Code.SETTINGS: SettingsError,
    Code.PROMPT: PromptError,
    Code.CONDITIONING: PromptError,
    Code.TOO_LARGE: PromptError,
    Code.DECODING: DecodingError,
    Code.BASE_LENGTH: StateError,
}
_PASSING = (Code.LIMIT, Code.DRAINING, Code.INTERNAL, Code.UNKNOWN_SESSION)
_FINAL = (
    Status.UNAUTHENTICATED,
    Status.PERMISSION_DENIED,
    Status.UNIMPLEMENTED,
    Status.INVALID_ARGUMENT,
)


class Again(Exception):
    """This attempt failed and another may not.

    after: seconds that the cloud asks us to wait. busy: it is there, and has too much to do.
    """

    def __init__(self, reason: str, after: float = 0.0, *, busy: bool = False) -> None:
        super().__init__(reason)
        self.after, self.busy = after, busy


def of_call(name: str, error: CallFailed | Disconnected, *, token: bool = False) -> Exception:
    """Return the error for a failed call to the cloud `name`. token: whether one was sent."""
    if isinstance(error, CallFailed) and error.status is Status.UNAUTHENTICATED:
        return CloudRefused(f"{name} does not know this edge: {_token_hint(token)}")
    if isinstance(error, CallFailed) and _is_final(error):
        return CloudRefused(f"{name} refused: {error.details}")
    if isinstance(error, Untrusted):
        return CloudRefused(f"{name} is not trusted: {error}")
    if isinstance(error, NotGrpc):
        return CloudRefused(f"{name}: {error}{_hint(str(error))}")
    return Again(str(error))


def _token_hint(token: bool) -> str:
    if token:
        return "its operator has not given out the token in --token-file (in Python token or token_file)"
    return "it requires a token, give --token-file FILE (in Python token=… or token_file=FILE)"


def _hint(protocol: str) -> str:
    if "TLS" in protocol:
        return ": give --tls or --ca FILE (in Python tls=True or ca=FILE)"
    return ": is this the port of a gateway, of metrics, or of a vLLM or SGLang server (vllm://, sglang://)?"


def _is_final(error: CallFailed) -> bool:
    """An exhausted resource passes, unless it is the size of our own message: gRPC has one code for both."""
    return error.status in _FINAL or (error.status is Status.RESOURCE_EXHAUSTED and "larger than" in error.details)


def of_frame(name: str, error: schema.Error) -> Exception:
    """What an Error frame of the cloud `name` means."""
    message = f"{name}: {error.message}"
    if error.code in _PASSING:
        return Again(message, error.retry_after_ms / 1000)
    return _TYPES.get(error.code, CloudRefused)(message)
