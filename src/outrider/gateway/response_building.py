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
from outrider.gateway.access import JSON
from outrider.gateway.errors import ErrorResponse, JsonObject, encode_json
from outrider.gateway.request_parsing import ParsedRequest
from outrider.gateway.request_schema import MODEL
from outrider.gateway.tools import ToolOutput

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

    media_type = JSON

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
        self._tools = ToolOutput(request.tools, whole=not request.stream) if request.tools is not None else None
        self._role_sent = False

    # Streams ------------------------------------------------------------------------------------------------

    def chunk(self, events: Seq[StreamEvent]) -> bytes:
        """Return the stream's chunks for these events, which may be empty."""
        text = self._text.add(events if self._tools is None else self._tools.add_special(events))
        tokens = self._tokens.add(events) if self._tokens is not None else []
        deltas = [text] if self._tools is None else self._tools.feed(text)
        if not any(deltas) and not tokens:
            return b""
        return self._role_chunk() + self._deltas(deltas, {"tokens": tokens} if tokens else None)

    def last(self, result: Result) -> bytes:
        """Return the last chunks: held-back text, the finish reason, the outcome, and the usage if requested."""
        rest = self._text.end(result if self._tools is None else self._tools.with_special(result))
        deltas = [rest] if self._tools is None else [*self._tools.feed(rest), *self._tools.end()]
        data = self._role_chunk() + (self._deltas(deltas) if any(deltas) else b"")
        data += self._event([self._delta_choice("", self._finish_reason(result))], self._outcome(result))
        if self._request.include_usage:
            data += encode_event({**self._head, "choices": [], "usage": usage(result)})
        return data + DONE

    def _role_chunk(self) -> bytes:
        """Return OpenAI's first chunk, with a chat's role or the prompt of a completion, unless it was sent."""
        if self._role_sent or not (self._chat or self._request.echo):
            return b""
        self._role_sent = True
        if not self._chat:
            return self._deltas([self._request.echo])
        return self._event([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def _deltas(self, deltas: Seq[str | JsonObject], more: JsonObject | None = None) -> bytes:
        first, *others = deltas or [""]
        events = [self._event([self._delta_choice(first, None)], more)]
        return b"".join(events + [self._event([self._delta_choice(delta, None)]) for delta in others])

    def _delta_choice(self, delta: str | JsonObject, finish: str | None) -> JsonObject:
        if isinstance(delta, str) and self._chat:
            delta = {"content": delta} if delta else {}
        return self._choice({"delta": delta} if self._chat else {"text": delta}, finish)

    def _finish_reason(self, result: Result) -> str:
        reason = FINISH_REASONS[result.finish_reason]
        return reason if self._tools is None else self._tools.finish_reason(reason)

    def _outcome(self, result: Result) -> JsonObject:
        warnings = self._tools.warnings if self._tools is not None else []
        return outcome(result, [*self._request.notes, *warnings])

    def _choice(self, data: JsonObject, finish: str | None) -> JsonObject:
        return {"index": 0, **data, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[JsonObject], more: JsonObject | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = None
        if more is not None:
            chunk["outrider"] = more
        return encode_event(chunk)

    def error(self, response: ErrorResponse) -> bytes:
        """Return an error as the last event of a stream, which OpenAI's clients raise."""
        return encode_event(response.body())

    # Whole answers ------------------------------------------------------------------------------------------

    def note(self, events: Seq[StreamEvent]) -> None:
        """Process events of an answer that is sent as a whole."""
        if self._tokens is not None:
            self._tokens.add(events)

    def body(self, result: Result) -> bytes:
        """Return the whole answer as JSON."""
        text = visible_text(result if self._tools is None else self._tools.with_special(result), self._request.stop)
        content = {"content": text} if self._tools is None else self._tools.message(text)
        message = {"role": "assistant", "refusal": None, **content}
        data = {"message": message} if self._chat else {"text": self._request.echo + text}
        choice = self._choice(data, self._finish_reason(result))
        report = self._outcome(result)
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


def encode_event(value: JsonObject) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"
