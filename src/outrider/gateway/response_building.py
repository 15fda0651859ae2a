"""From what a generation tells (events, then a result) to the bodies and chunks that a client reads.

Text goes out when nothing can take it back (`StreamEvent.settled`), and not while it could be the beginning of a stop
string, which OpenAI's API leaves out of the text.
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
    """The text that nothing can take back any more."""

    def __init__(self, stop: Seq[str] = ()) -> None:
        self._stop = stop
        self._pieces: list[str] = []
        self._num_stable = 0  # how many of the pieces stay
        self._num_taken = 0  # how many of those were taken
        self._held_back = ""  # taken, but perhaps the beginning of a stop string
        self._sent: list[str] = []

    def add(self, events: Seq[StreamEvent]) -> str:
        """Text that may go out, with these events known."""
        for event in events:
            if event.kind != "provisional":
                self._apply(event)
        return self._release("".join(self._newly_stable()))

    def end(self, result: Result) -> str:
        """Return the text that was held back, at the end.

        Raises:
            StateError: the result's text does not begin with the streamed text.
        """
        sent = "".join(self._sent)
        whole = visible_text(result, self._stop, len(sent))
        if not whole.startswith(sent):
            raise StateError("the text that was streamed is not the result's: do not use it")
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
    """How many characters at the end of `text` are a stop string's, or could become one's.

    A stop string ends the output with the token that completes it: one that lies in the first `known` characters, seen
    before, was none (a special token stood in it).
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
    """A result's text as OpenAI's API shows it: without the stop string that ended it, which stands in no part of the
    first `sent` characters."""
    text = result.text or ""
    if result.finish_reason != "stop":
        return text
    places = [at for word in stop if (at := text.find(word, sent)) >= 0]
    return text[: min(places)] if places else text


class TokenReports:
    """What is reported of tokens: who decided each, and how sure the drafter was of it."""

    def __init__(self, *, provisional: bool = False) -> None:
        self._provisional = provisional
        self._signals: dict[int, tuple[int, Any]] = {}  # by index: of which token, and its signals
        self.final: list[dict[str, Any]] = []

    def add(self, events: Seq[StreamEvent]) -> list[dict[str, Any]]:
        """The reports of these events. Provisional ones are kept to oneself unless asked for."""
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
    """One answer, as a body or as chunks. chat: of a chat, else a plain completion."""

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

    # Streams

    def chunk(self, events: Seq[StreamEvent]) -> bytes:
        """What these events add to the stream; empty where there is nothing to say yet."""
        text = self._text.add(events)
        tokens = self._tokens.add(events) if self._tokens is not None else []
        if not text and not tokens:
            return b""
        return self._role_chunk() + self._delta(text, {"tokens": tokens} if tokens else None)

    def last(self, result: Result) -> bytes:
        """The end of the stream: text that was held back, why it ended, what it came to, and its usage if asked for."""
        rest = self._text.end(result)
        data = self._role_chunk() + (self._delta(rest) if rest else b"")
        data += self._event([self._choice({}, "", FINISH_REASONS[result.finish_reason])], self._outcome(result))
        if self._request.include_usage:
            data += _data({**self._head, "choices": [], "usage": usage(result)})
        return data + DONE

    def _role_chunk(self) -> bytes:
        """OpenAI's first chunk of a chat: who speaks."""
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

    # Whole answers

    def note(self, events: Seq[StreamEvent]) -> None:
        """Take events of an answer that is given as a whole."""
        if self._tokens is not None:
            self._tokens.add(events)

    def body(self, result: Result) -> bytes:
        """The whole answer."""
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
    """The `outrider` object: the guarantee, and what it rests on. itl_s: seconds from token to token, their mean."""
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
    return {**fields, "warnings": [*data["warnings"], *notes], **rounded}


def usage(result: Result) -> dict[str, int]:
    """Tokens, as OpenAI counts them: the end-of-sequence token is one of those that were generated."""
    generated = len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": result.prompt_tokens + generated,
    }


def error_event(refusal: ErrorResponse) -> bytes:
    """The end of a stream that had begun: the client raises what it says."""
    return _data(refusal.body())


def encode_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
