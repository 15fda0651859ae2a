"""Response bodies and stream chunks, from the events and the result of a generation.

Text is sent once it is final (`StreamEvent.settled`). A possible beginning of a stop string is held back, because
OpenAI's API excludes the stop string from the text.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any, Final

from outrider.api import StreamEvent
from outrider.decoding.result import Result
from outrider.decoding.stopping import FinishReason
from outrider.errors import StateError
from outrider.gateway.errors import ErrorResponse
from outrider.gateway.request_parsing import ParsedRequest
from outrider.gateway.request_schema import MODEL

FINISH_REASONS: Final[dict[FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "sentences": "stop",
    "loop": "stop",
    "length": "length",
}
DONE: Final = b"data: [DONE]\n\n"


class StableText:
    """The final part of a stream's text, which later verdicts cannot change. stop: the stop strings."""

    def __init__(self, stop: Seq[str] = ()) -> None:
        self._stop = stop
        self._pieces: list[str] = []
        self._num_stable = 0  # pieces that are final
        self._num_taken = 0  # final pieces that were processed
        self._held_back = ""  # processed, but possibly the beginning of a stop string
        self._sent: list[str] = []

    def add(self, events: Seq[StreamEvent]) -> str:
        """Process events, and return the text that may be sent now."""
        for event in events:
            if event.kind != "provisional":
                self._apply(event)
        return self._release("".join(self._newly_stable()))

    def end(self, result: Result) -> str:
        """Return the rest of the text.

        Raises:
            StateError: the result's text does not begin with the text that was sent.
        """
        sent = "".join(self._sent)
        whole = visible_text(result, self._stop, len(sent))
        if not whole.startswith(sent):
            raise StateError("the streamed text is not the result's: discard it")
        return whole[len(sent) :]

    def _apply(self, event: StreamEvent) -> None:
        if event.kind == "revised":
            del self._pieces[event.index :]
        if event.index == len(self._pieces):
            self._pieces.append(event.text)
        self._num_stable = event.settled

    def _newly_stable(self) -> list[str]:
        taken = self._pieces[self._num_taken : self._num_stable]
        self._num_taken = max(self._num_taken, self._num_stable)
        return taken

    def _release(self, text: str) -> str:
        if self._stop and text:
            text = self._held_back + text
            free = len(text) - _partial_stop_chars(text, len(self._held_back), self._stop)
            text, self._held_back = text[:free], text[free:]
        if text:
            self._sent.append(text)
        return text


def _partial_stop_chars(text: str, known: int, stop: Seq[str]) -> int:
    """Return the number of characters at the end of `text` that are, or may become, a stop string.

    known: characters that were checked before. A stop string within them did not end the output, because a special
    token interrupts it.
    """
    most = 0
    for word in stop:
        at = text.find(word, max(0, known - len(word) + 1))
        if at >= 0:
            most = max(most, len(text) - at)
        part = next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
        most = max(most, part)
    return most


def visible_text(result: Result, stop: Seq[str], sent: int = 0) -> str:
    """Return a result's text without the stop string that ended it, as in OpenAI's API.

    sent: characters in which the stop string is not searched, because they were sent already.
    """
    text = result.text or ""
    if result.finish_reason != "stop":
        return text
    starts = [at for word in stop if (at := text.find(word, sent)) >= 0]
    return text[: min(starts)] if starts else text


class TokenReports:
    """Reports on tokens: the source of each, and the drafter's confidence in it."""

    def __init__(self, *, provisional: bool = False) -> None:
        self._provisional = provisional
        self._signals: dict[int, tuple[int, Any]] = {}  # by index: the token id, and its signals
        self.final: list[dict[str, Any]] = []

    def add(self, events: Seq[StreamEvent]) -> list[dict[str, Any]]:
        """Return the reports of these events, those of provisional tokens only if they were requested."""
        return [self._report(event) for event in events if self._is_reported(event)]

    def _is_reported(self, event: StreamEvent) -> bool:
        if event.signals is not None:
            self._signals[event.index] = (event.token_id, asdict(event.signals))
        return self._provisional or event.kind != "provisional"

    def _report(self, event: StreamEvent) -> dict[str, Any]:
        token, signals = self._signals.get(event.index, (None, None))
        report = {
            "kind": event.kind,
            "index": event.index,
            "id": event.token_id,
            "text": event.text,
            "source": event.source.value,
            "signals": signals if token == event.token_id else None,
        }
        if event.kind != "provisional":
            self.final[event.index :] = [report, *(self.final[event.index + 1 :] if event.kind == "confirmed" else [])]
        return report


class Answer:
    """One answer, as a body or as chunks. chat: False for a plain completion."""

    def __init__(self, request: ParsedRequest, *, chat: bool) -> None:
        self._request, self._chat = request, chat
        kind = "chat.completion" if chat else "text_completion"
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": f"{kind}.chunk" if chat and request.stream else kind,
            "created": int(time.time()),
            "model": MODEL,
        }
        self._text = StableText(request.stop)
        self._tokens = TokenReports(provisional=request.provisional) if request.tokens else None
        self._role_sent = False

    # Streams ------------------------------------------------------------------------------------------------

    def chunk(self, events: Seq[StreamEvent]) -> bytes:
        """Return the stream's chunks for these events, which may be empty."""
        text = self._text.add(events)
        tokens = self._tokens.add(events) if self._tokens is not None else []
        if not text and not tokens:
            return b""
        return self._role_chunk() + self._delta(text, {"tokens": tokens} if tokens else None)

    def last(self, result: Result) -> bytes:
        """Return the last chunks: held-back text, the finish reason, the outcome, and the usage if requested."""
        rest = self._text.end(result)
        data = self._role_chunk() + (self._delta(rest) if rest else b"")
        data += self._event([self._choice({}, "", FINISH_REASONS[result.finish_reason])], self._outcome(result))
        if self._request.include_usage:
            data += _data({**self._head, "choices": [], "usage": usage(result)})
        return data + DONE

    def _role_chunk(self) -> bytes:
        """Return OpenAI's first chunk of a chat, with the role, unless it was sent."""
        if self._role_sent or not self._chat:
            return b""
        self._role_sent = True
        return self._event([self._choice({"role": "assistant", "content": ""}, "", None)])

    def _delta(self, text: str, more: dict[str, Any] | None = None) -> bytes:
        return self._event([self._choice({"content": text} if text else {}, text, None)], more)

    def _choice(self, delta: dict[str, Any], text: str, finish: str | None) -> dict[str, Any]:
        data = {"delta": delta} if self._chat else {"text": text}
        return {"index": 0, **data, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = None
        if more is not None:
            chunk["outrider"] = more
        return _data(chunk)

    # Whole answers ------------------------------------------------------------------------------------------

    def note(self, events: Seq[StreamEvent]) -> None:
        """Process events of an answer that is sent as a whole."""
        if self._tokens is not None:
            self._tokens.add(events)

    def body(self, result: Result) -> bytes:
        """Return the whole answer as JSON."""
        text = visible_text(result, self._request.stop)
        data: dict[str, Any] = {"text": text}
        if self._chat:
            data = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **data, "logprobs": None, "finish_reason": FINISH_REASONS[result.finish_reason]}
        outcome = self._outcome(result)
        if self._tokens is not None:
            outcome["tokens"] = self._tokens.final[: len(result.token_ids)]
        return encode_json({**self._head, "choices": [choice], "usage": usage(result), "outrider": outcome})

    def _outcome(self, result: Result) -> dict[str, Any]:
        return outcome(result, self._request.notes)


def outcome(result: Result, notes: Seq[str] = ()) -> dict[str, Any]:
    """Return the `outrider` object of an answer: guarantee and statistics. itl_s: mean seconds between tokens."""
    data, stats = result.to_json(), result.stats
    count = len(result.token_ids)
    rates = {
        "acceptance_rate": stats.acceptance_rate,
        "escalation_rate": stats.escalation_rate,
        "cloud_share": stats.cloud_share,
        "itl_s": (stats.total_s - stats.ttft_s) / (count - 1) if count > 1 else None,
    }
    fields = {name: data[name] for name in ("guarantee", "finish_reason", "stats", "risk", "ledger", "near_ties")}
    rounded = {name: None if rate is None else round(rate, 6) for name, rate in rates.items()}
    return {**fields, "warnings": [*result.warnings, *notes], **rounded}


def usage(result: Result) -> dict[str, int]:
    """Return OpenAI's usage object. The end-of-sequence token counts as a generated one."""
    generated = len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": result.prompt_tokens + generated,
    }


def error_event(refusal: ErrorResponse) -> bytes:
    """Return an error as the last event of a stream, which OpenAI's clients raise."""
    return _data(refusal.body())


def encode_json(value: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8. Half a surrogate pair is escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
