"""The service's log: one event a line, with fields, and without prompts or outputs.

An event is a constant text, as in `log.info("session opened", extra={"tokens": 7})`. A field is one of
`NUMERIC_FIELDS`, a single number, or one of `TEXT_FIELDS`, a short text. Prompts, outputs, token ids, media and bearer
tokens are never logged: `RedactingFilter` removes other fields from every record, and names them in `withheld`. A text
field (a reason, a kind) must not quote input.
"""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime
from json import dumps
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter

from outrider.errors import SettingsError, quote

_COUNT_FIELDS = {"accepted", "base_length", "batch", "drafts", "limit", "port", "prompt_tokens", "round", "sessions"}
_SIZE_FIELDS = {"bytes", "cache_bytes", "queue_seconds", "seconds", "slot", "slots", "tokens"}
NUMERIC_FIELDS = frozenset(_COUNT_FIELDS | _SIZE_FIELDS)
_PEER_FIELDS = {"address", "host", "identity", "peer", "session"}
TEXT_FIELDS = frozenset(_PEER_FIELDS | {"kind", "method", "model", "reason", "status", "version", "withheld"})
log = logging.getLogger("outrider.cloud")

_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class RedactingFilter(logging.Filter):
    """Removes everything from records that could be a user's text, and names it in `withheld`.

    A traceback keeps its files and lines and the exceptions' types, but not their messages, which may quote input.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove the unsafe fields of a record. Return True: no record is dropped."""
        withheld = sorted(name for name in _extra_fields(record) if not _is_safe(name, getattr(record, name)))
        for name in withheld:
            delattr(record, name)
        if record.args:  # would be formatted into the event
            record.args = None
            withheld.append("args")
        if not isinstance(record.msg, str):
            record.msg = "event withheld"
            withheld.append("event")
        if record.exc_info and record.exc_info[1]:
            record.exc_text = _format_traceback(record.exc_info[1])
        record.exc_info = None
        if withheld:
            record.withheld = " ".join(withheld)
        return True


class TextFormatter(logging.Formatter):
    """Text lines: `2026-01-31T12:00:00.000+00:00 INFO session opened session=7 identity=lab`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line, followed by its traceback if it has one."""
        fields = [f"{name}={_quote(value)}" for name, value in _extra_fields(record).items()]
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = " ".join([time, record.levelname, record.getMessage(), *fields])
        return f"{line}\n{record.exc_text}" if record.exc_text else line


class JsonEventFormatter(JsonFormatter):
    """JSON lines: an object with timestamp (ISO, UTC), level, event, and the fields."""

    def __init__(self) -> None:
        names = {"levelname": "level", "message": "event", "exc_info": "traceback"}
        super().__init__("{levelname}{message}", style="{", rename_fields=names, timestamp=True)


def configure(level: str, *, json: bool, stream: TextIO) -> None:
    """Write the service's log to `stream`, from `level` ("info", "WARNING", …) on. Replaces earlier configuration.

    Raises:
        SettingsError: the level is unknown.
    """
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise SettingsError(f"log level {quote(level)}: expected one of debug, info, warning, error, critical")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonEventFormatter() if json else TextFormatter())
    handler.addFilter(RedactingFilter())  # a filter of the logger would not see its children's records
    log.handlers[:] = [handler]
    log.setLevel(levels[level.upper()])
    log.propagate = False  # the root's handlers do not redact


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES}


def _is_safe(name: str, value: object) -> bool:
    """Return whether a field may be logged. The type counts too: `tokens` is a number, never a text or a list."""
    return (name in NUMERIC_FIELDS and isinstance(value, (int, float))) or (
        name in TEXT_FIELDS and isinstance(value, (str, int))
    )


def _format_traceback(error: BaseException) -> str:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    after = f"{_format_traceback(cause)}\nthen\n" if cause is not None else ""
    return f"{after}{''.join(traceback.format_tb(error.__traceback__))}{type(error).__name__}"


def _quote(value: object) -> str:
    """Quote a value unless it is one printable word, so that a peer's name cannot forge a line or a field."""
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' ="\\') else dumps(text)
