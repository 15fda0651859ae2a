"""Response bodies and stream chunks, from the events and the result of a generation.

Text is sent once it is final (`StreamEvent.settled`). A possible beginning of a stop string is held back, because
OpenAI's API excludes the stop string from the text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Final

from outrider.api import StreamEvent
from outrider.decoding.result import Result
from outrider.decoding.stopping import FinishReason
from outrider.errors import StateError
from outrider.gateway.errors import ErrorResponse, JsonObject, encode_json
from outrider.gateway.logprobs import LogprobReports
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
            if event.kind == "provisional":
                continue
            if event.kind == "revised":
                del self._pieces[event.index :]
            if event.index == len(self._pieces):
                self._pieces.append(event.text)
            self._num_stable = event.settled
        taken = self._pieces[self._num_taken : self._num_stable]
        self._num_taken = max(self._num_taken, self._num_stable)
        return self._release("".join(taken))

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
        self._signals: dict[int, tuple[int, JsonObject]] = {}  # by index: the token id, and its signals
        self.final: list[JsonObject] = []

    def add(self, events: Seq[StreamEvent]) -> list[JsonObject]:
        """Return the reports of these events, those of provisional tokens only if they were requested."""
        reports = []
        for event in events:
            if event.signals is not None:
                self._signals[event.index] = (event.token_id, asdict(event.signals))
            if self._provisional or event.kind != "provisional":
                reports.append(self._report(event))
        return reports

    def _report(self, event: StreamEvent) -> JsonObject:
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
        self._logprobs = LogprobReports(chat=chat) if request.settings.get("logprobs") is not None else None
        self._role_sent = False

    # Streams ------------------------------------------------------------------------------------------------

    def chunk(self, events: Seq[StreamEvent]) -> bytes:
        """Return the stream's chunks for these events, which may be empty."""
        text = self._text.add(events)
        tokens = self._tokens.add(events) if self._tokens is not None else []
        logprobs = self._logprobs.add(events) if self._logprobs is not None else None
        if not text and not tokens and logprobs is None:
            return b""
        return self._role_chunk() + self._delta(text, {"tokens": tokens} if tokens else None, logprobs)

    def last(self, result: Result) -> bytes:
        """Return the last chunks: held-back text, the finish reason, the outcome, and the usage if requested."""
        rest = self._text.end(result)
        logprobs = self._logprobs.end(result) if self._logprobs is not None else None
        is_empty = not rest and logprobs is None
        data = self._role_chunk() + (b"" if is_empty else self._delta(rest, None, logprobs))
        data += self._event(
            [self._delta_choice("", FINISH_REASONS[result.finish_reason])], outcome(result, self._request.notes)
        )
        if self._request.include_usage:
            data += _data({**self._head, "choices": [], "usage": usage(result)})
        return data + DONE

    def _role_chunk(self) -> bytes:
        """Return OpenAI's first chunk of a chat, with the role, unless it was sent."""
        if self._role_sent or not self._chat:
            return b""
        self._role_sent = True
        return self._event([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def _delta(self, text: str, more: JsonObject | None = None, logprobs: JsonObject | None = None) -> bytes:
        return self._event([self._delta_choice(text, None, logprobs)], more)

    def _delta_choice(self, text: str, finish: str | None, logprobs: JsonObject | None = None) -> JsonObject:
        data = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        return self._choice(data, finish, logprobs)

    def _choice(self, data: JsonObject, finish: str | None, logprobs: JsonObject | None = None) -> JsonObject:
        return {"index": 0, **data, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, choices: list[JsonObject], more: JsonObject | None = None) -> bytes:
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
        message = {"role": "assistant", "content": text, "refusal": None}
        logprobs = self._logprobs.end(result) if self._logprobs is not None else None
        data = {"message": message} if self._chat else {"text": text}
        choice = self._choice(data, FINISH_REASONS[result.finish_reason], logprobs)
        report = outcome(result, self._request.notes)
        if self._tokens is not None:
            report["tokens"] = self._tokens.final[: len(result.token_ids)]
        return encode_json({**self._head, "choices": [choice], "usage": usage(result), "outrider": report})


def outcome(result: Result, notes: Seq[str] = ()) -> JsonObject:
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


def usage(result: Result) -> JsonObject:
    """Return OpenAI's usage object. The end-of-sequence token counts as a generated one."""
    generated = len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": result.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": result.stats.cached_tokens},
    }


def error_event(refusal: ErrorResponse) -> bytes:
    """Return an error as the last event of a stream, which OpenAI's clients raise."""
    return _data(refusal.body())


def _data(value: JsonObject) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
