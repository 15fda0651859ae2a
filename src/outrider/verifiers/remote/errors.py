"""Map the cloud's errors to exceptions: retryable ones and final ones."""

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
from outrider.protocol import schema
from outrider.protocol.messages import ErrorCode
from outrider.transport.status import CallFailed, Disconnected, NotGrpc, Status, UntrustedServer
from outrider.verifiers.retry import Retryable

_ERROR_TYPES: dict[int, type[OutriderError]] = {
    ErrorCode.VOCABULARY: VocabularyMismatch,
    ErrorCode.SETTINGS: SettingsError,
    ErrorCode.PROMPT: PromptError,
    ErrorCode.CONDITIONING: PromptError,
    ErrorCode.TOO_LARGE: PromptError,
    ErrorCode.DECODING: DecodingError,
    ErrorCode.BASE_LENGTH: StateError,
}
_RETRYABLE_CODES = (ErrorCode.LIMIT, ErrorCode.DRAINING, ErrorCode.INTERNAL, ErrorCode.UNKNOWN_SESSION)
_FINAL_STATUSES = (Status.UNAUTHENTICATED, Status.PERMISSION_DENIED, Status.UNIMPLEMENTED, Status.INVALID_ARGUMENT)


def map_call_error(name: str, error: CallFailed | Disconnected, *, token: bool = False) -> Exception:
    """Return the error for a failed call to the cloud `name`. token: whether one was sent."""
    # gRPC has one code for limits, which are retryable, and for a message that is too large.
    is_too_large = (
        isinstance(error, CallFailed) and error.status is Status.RESOURCE_EXHAUSTED and "larger than" in error.details
    )
    if isinstance(error, CallFailed) and error.status is Status.UNAUTHENTICATED:
        return CloudRefused(f"{name} does not know this edge: {_token_hint(token)}")
    if isinstance(error, CallFailed) and (error.status in _FINAL_STATUSES or is_too_large):
        return CloudRefused(f"{name} refused: {error.details}")
    if isinstance(error, UntrustedServer):
        return CloudRefused(f"{name} is not trusted: {error}")
    if isinstance(error, NotGrpc):
        return CloudRefused(f"{name}: {error}{_protocol_hint(str(error))}")
    return Retryable(str(error))


def _token_hint(token: bool) -> str:
    if token:
        return "its operator has not given out the token in --token-file (in Python token or token_file)"
    return "it requires a token, give --token-file FILE (in Python token=… or token_file=FILE)"


def _protocol_hint(protocol: str) -> str:
    if "TLS" in protocol:
        return ": give --tls or --ca FILE (in Python tls=True or ca=FILE)"
    return ": is this the port of a gateway, of metrics, or of a vLLM or SGLang server (vllm://, sglang://)?"


def map_error_frame(name: str, error: schema.Error) -> Exception:
    """Return the exception for an Error frame of the cloud `name`."""
    message = f"{name}: {error.message}"
    if error.code in _RETRYABLE_CODES:
        return Retryable(message, error.retry_after_ms / 1000)
    return _ERROR_TYPES.get(error.code, CloudRefused)(message)
