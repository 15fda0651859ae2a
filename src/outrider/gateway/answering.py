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
from outrider.core.outcome import Result
from outrider.core.stopping import Reason
from outrider.errors import StateError
from outrider.gateway.asking import Asked
from outrider.gateway.refusing import Refusal
from outrider.gateway.schemas import MODEL

FINISH: Final[dict[Reason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "sentences": "stop",
    "loop": "stop",
    "length": "length",
}
DONE: Final = b"data: [DONE]\n\n"


class Settled:
    """The text that nothing can take back any more."""

    def __init__(self, stop: Seq[str] = ()) -> None:
        self._stop = stop
        self._pieces: list[str] = []
        self._final = 0  # how many of the pieces stay
        self._settled = 0  # how many of those were taken
        self._held = ""  # taken, but perhaps the beginning of a stop string
        self._sent: list[str] = []

    def add(self, events: Seq[StreamEvent]) -> str:
        """Text that may go out, with these events known."""
        for event in events:
            if event.kind != "provisional":
                self._place(event)
        return self._out("".join(self._taken()))

    def end(self, result: Result) -> str:
        """Return the text that was held back, at the end.

        Raises:
            StateError: the result's text does not begin with the streamed text.
        """
        sent = "".join(self._sent)
        whole = visible(result, self._stop, len(sent))
        if not whole.startswith(sent):
            raise StateError("the text that was streamed is not the result's: do not use it")
        return whole[len(sent) :]

    def _place(self, event: StreamEvent) -> None:
        if event.kind == "revised":
            del self._pieces[event.index :]
        if event.index == len(self._pieces):
            self._pieces.append(event.text)
        self._final = event.settled

    def _taken(self) -> list[str]:
        taken = self._pieces[self._settled : self._final]
        self._settled = max(self._settled, self._final)
        return taken

    def _out(self, text: str) -> str:
        if self._stop and text:
            text = self._held + text
            free = len(text) - _withheld(text, len(self._held), self._stop)
            text, self._held = text[:free], text[free:]
        if text:
            self._sent.append(text)
        return text


def _withheld(text: str, known: int, stop: Seq[str]) -> int:
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


def visible(result: Result, stop: Seq[str], sent: int = 0) -> str:
    """A result's text as OpenAI's API shows it: without the stop string that ended it, which stands in no part of the
    first `sent` characters."""
    text = result.text or ""
    if result.finish_reason != "stop":
        return text
    places = [at for word in stop if (at := text.find(word, sent)) >= 0]
    return text[: min(places)] if places else text


class Tokens:
    """What is reported of tokens: who decided each, and how sure the drafter was of it."""

    def __init__(self, *, provisional: bool = False) -> None:
        self._provisional = provisional
        self._signals: dict[int, tuple[int, Any]] = {}  # by index: of which token, and its signals
        self.final: list[dict[str, Any]] = []

    def add(self, events: Seq[StreamEvent]) -> list[dict[str, Any]]:
        """The reports of these events. Provisional ones are kept to oneself unless asked for."""
        return [self._report(event) for event in events if self._wanted(event)]

    def _wanted(self, event: StreamEvent) -> bool:
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

    def __init__(self, asked: Asked, *, chat: bool) -> None:
        self._asked, self._chat = asked, chat
        kind = "chat.completion" if chat else "text_completion"
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": f"{kind}.chunk" if chat and asked.stream else kind,
            "created": int(time.time()),
            "model": MODEL,
        }
        self._text = Settled(asked.stop)
        self._tokens = Tokens(provisional=asked.provisional) if asked.tokens else None
        self._begun = False

    # Streams

    def chunk(self, events: Seq[StreamEvent]) -> bytes:
        """What these events add to the stream; empty where there is nothing to say yet."""
        text = self._text.add(events)
        tokens = self._tokens.add(events) if self._tokens is not None else []
        if not text and not tokens:
            return b""
        return self._opening() + self._delta(text, {"tokens": tokens} if tokens else None)

    def last(self, result: Result) -> bytes:
        """The end of the stream: text that was held back, why it ended, what it came to, and its usage if asked for."""
        rest = self._text.end(result)
        said = self._opening() + (self._delta(rest) if rest else b"")
        said += self._event([self._choice({}, "", FINISH[result.finish_reason])], self._outcome(result))
        if self._asked.include_usage:
            said += _data({**self._head, "choices": [], "usage": usage(result)})
        return said + DONE

    def _opening(self) -> bytes:
        """OpenAI's first chunk of a chat: who speaks."""
        if self._begun or not self._chat:
            return b""
        self._begun = True
        return self._event([self._choice({"role": "assistant", "content": ""}, "", None)])

    def _delta(self, text: str, more: dict[str, Any] | None = None) -> bytes:
        return self._event([self._choice({"content": text} if text else {}, text, None)], more)

    def _choice(self, delta: dict[str, Any], text: str, finish: str | None) -> dict[str, Any]:
        said = {"delta": delta} if self._chat else {"text": text}
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._asked.include_usage:
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
        text = visible(result, self._asked.stop)
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": FINISH[result.finish_reason]}
        outcome = self._outcome(result)
        if self._tokens is not None:
            outcome["tokens"] = self._tokens.final[: len(result.token_ids)]
        return encoded({**self._head, "choices": [choice], "usage": usage(result), "outrider": outcome})

    def _outcome(self, result: Result) -> dict[str, Any]:
        return outcome(result, self._asked.notes)


def outcome(result: Result, notes: Seq[str] = ()) -> dict[str, Any]:
    """The `outrider` object: the guarantee, and what it rests on. itl_s: seconds from token to token, their mean."""
    said, stats = result.to_json(), result.stats
    count = len(result.token_ids)
    rates = {
        "acceptance_rate": stats.acceptance_rate,
        "escalation_rate": stats.escalation_rate,
        "cloud_share": stats.cloud_share,
        "itl_s": (stats.total_s - stats.ttft_s) / (count - 1) if count > 1 else None,
    }
    kept = {name: said[name] for name in ("guarantee", "finish_reason", "stats", "risk", "ledger", "near_ties")}
    rounded = {name: None if rate is None else round(rate, 6) for name, rate in rates.items()}
    return {**kept, "warnings": [*said["warnings"], *notes], **rounded}


def usage(result: Result) -> dict[str, int]:
    """Tokens, as OpenAI counts them: the end-of-sequence token is one of those that were generated."""
    generated = len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": result.prompt_tokens + generated,
    }


def failed(refusal: Refusal) -> bytes:
    """The end of a stream that had begun: the client raises what it says."""
    return _data(refusal.body())


def encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"
