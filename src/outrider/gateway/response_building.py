"""Response bodies and stream chunks, from the events and the result of a generation.

Text is sent once it is final (`StreamEvent.settled`). A possible beginning of a stop string is held back, because
OpenAI's API excludes the stop string from the text.
"""

from __future__ import annotations

import math
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
from outrider.gateway.logprobs import LogprobReports
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


class Choice:
    """One choice of an answer, as a part of a body or as chunks. chat: False for a plain completion."""

    def __init__(self, request: ParsedRequest, head: JsonObject, index: int, *, chat: bool) -> None:
        self._request, self._head, self._index, self._chat = request, head, index, chat
        self._text = StableText(request.stop)
        self._tokens = TokenReports(provisional=request.provisional) if request.tokens else None
        self._logprobs = LogprobReports(chat=chat) if request.logprobs else None
        self._tools = ToolOutput(request.tools, whole=not request.stream) if request.tools is not None else None
        self._echo = request.echo[index // request.candidates] if request.echo else ""
        self._role_sent = False

    # Streams ------------------------------------------------------------------------------------------------

    def chunk(self, events: Seq[StreamEvent]) -> bytes:
        """Return the stream's chunks for these events, which may be empty."""
        text = self._text.add(events if self._tools is None else self._tools.add_special(events))
        tokens = self._tokens.add(events) if self._tokens is not None else []
        logprobs = self._logprobs.add(events) if self._logprobs is not None else None
        deltas = [text] if self._tools is None else self._tools.feed(text)
        if not any(deltas) and not tokens and logprobs is None:
            return b""
        return self._role_chunk() + self._deltas(deltas, {"tokens": tokens} if tokens else None, logprobs)

    def last(self, result: Result) -> bytes:
        """Return the last chunks: held-back text, the finish reason, and the outcome."""
        rest = self._text.end(result if self._tools is None else self._tools.with_special(result))
        deltas = [rest] if self._tools is None else [*self._tools.feed(rest), *self._tools.end()]
        logprobs = self._logprobs.end(result) if self._logprobs is not None else None
        is_empty = not any(deltas) and logprobs is None
        data = self._role_chunk() + (b"" if is_empty else self._deltas(deltas, None, logprobs))
        return data + self._event([self._delta_choice("", self._finish_reason(result))], self._outcome(result))

    def _role_chunk(self) -> bytes:
        """Return OpenAI's first chunk, with a chat's role or the prompt of a completion, unless it was sent."""
        if self._role_sent or not (self._chat or self._echo):
            return b""
        self._role_sent = True
        if not self._chat:
            return self._deltas([self._echo])
        return self._event([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def _deltas(
        self, deltas: Seq[str | JsonObject], more: JsonObject | None = None, logprobs: JsonObject | None = None
    ) -> bytes:
        first, *others = deltas or [""]
        events = [self._event([self._delta_choice(first, None, logprobs)], more)]
        return b"".join(events + [self._event([self._delta_choice(delta, None)]) for delta in others])

    def _delta_choice(
        self, delta: str | JsonObject, finish: str | None, logprobs: JsonObject | None = None
    ) -> JsonObject:
        if isinstance(delta, str) and self._chat:
            delta = {"content": delta} if delta else {}
        return self._choice({"delta": delta} if self._chat else {"text": delta}, finish, logprobs)

    def _finish_reason(self, result: Result) -> str:
        reason = FINISH_REASONS[result.finish_reason]
        return reason if self._tools is None else self._tools.finish_reason(reason)

    def _outcome(self, result: Result) -> JsonObject:
        warnings = self._tools.warnings(result.finish_reason) if self._tools is not None else []
        return outcome(result, [*self._request.notes, *warnings])

    def _choice(self, data: JsonObject, finish: str | None, logprobs: JsonObject | None = None) -> JsonObject:
        return {"index": self._index, **data, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, choices: list[JsonObject], more: JsonObject | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = None
        if more is not None:
            chunk["outrider"] = more
        return encode_event(chunk)

    # Whole answers ------------------------------------------------------------------------------------------

    def note(self, events: Seq[StreamEvent]) -> None:
        """Process events of an answer that is sent as a whole."""
        if self._tokens is not None:
            self._tokens.add(events)

    def whole(self, result: Result) -> tuple[JsonObject, JsonObject]:
        """Return the choice of a body, and the outcome of its generation."""
        text = visible_text(result if self._tools is None else self._tools.with_special(result), self._request.stop)
        content = {"content": text} if self._tools is None else self._tools.message(text)
        logprobs = self._logprobs.end(result) if self._logprobs is not None else None
        message = {"role": "assistant", "refusal": None, **content}
        data = {"message": message} if self._chat else {"text": self._echo + text}
        choice = self._choice(data, self._finish_reason(result), logprobs)
        report = self._outcome(result)
        if self._tokens is not None:
            report["tokens"] = self._tokens.final[: len(result.token_ids)]
        return choice, report


class Answer:
    """One answer, as a body or as chunks. chat: False for a plain completion. choices: one for each generation."""

    media_type = JSON

    def __init__(self, request: ParsedRequest, *, chat: bool) -> None:
        self._request = request
        kind = "chat.completion" if chat else "text_completion"
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head: JsonObject = {
            "id": self.id,
            "object": f"{kind}.chunk" if chat and request.stream else kind,
            "created": int(time.time()),
            "model": MODEL,
        }
        self.choices: Seq[Choice] = [
            Choice(request, self._head, index, chat=chat) for index in range(request.candidates * len(request.prompts))
        ]

    def end(self, results: Seq[Result]) -> bytes:
        """Return the end of a stream, with the usage if requested. results: those of all choices."""
        chunk = {**self._head, "choices": [], "usage": self._usage(results)}
        return (encode_event(chunk) if self._request.include_usage else b"") + DONE

    def error(self, response: ErrorResponse) -> bytes:
        """Return an error as the last event of a stream, which OpenAI's clients raise."""
        return encode_event(response.body())

    def body(self, results: Seq[Result]) -> bytes:
        """Return the whole answer as JSON. results: those of all generations, of which the `n` likeliest are returned.

        With a single choice, the outcome is a field of the answer. Otherwise each choice has its own.
        """
        sent = [self.choices[at].whole(results[at]) for at in self._select(results)]
        choices = [{**choice, "index": index} for index, (choice, _) in enumerate(sent)]
        body = {**self._head, "choices": choices, "usage": self._usage(results)}
        if len(choices) == 1:
            return encode_json({**body, "outrider": sent[0][1]})
        for choice, (_, report) in zip(choices, sent, strict=True):
            choice["outrider"] = report
        return encode_json(body)

    def _select(self, results: Seq[Result]) -> list[int]:
        """Return the `n` likeliest generations of each prompt, the best first."""
        n, candidates = self._request.n, self._request.candidates
        groups = [range(start, start + candidates) for start in range(0, len(results), candidates)]
        if n == candidates:
            return list(range(len(results)))
        return [at for group in groups for at in sorted(group, key=lambda at: -mean_logprob(results[at]))[:n]]

    def _usage(self, results: Seq[Result]) -> JsonObject:
        """Return the usage of all generations. Each prompt counts once."""
        candidates = self._request.candidates
        counts = [usage(results[start : start + candidates]) for start in range(0, len(results), candidates)]
        cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in counts)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        totals = {name: sum(each[name] for each in counts) for name in names}
        return {**totals, "prompt_tokens_details": {"cached_tokens": cached}}


def mean_logprob(result: Result) -> float:
    """Return the mean log-probability of a result's tokens, the score of `best_of`."""
    return math.fsum(each.logprob for each in result.logprobs) / len(result.logprobs)


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


def usage(results: Seq[Result]) -> JsonObject:
    """Return OpenAI's usage object. The prompt counts once, the tokens of all generations count.

    The end-of-sequence token counts as a generated one. Cached tokens are those that no generation computed again.
    """
    generated = sum(len(result.token_ids) for result in results)
    prompt = results[0].prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": min(result.stats.cached_tokens for result in results)},
    }


def encode_event(value: JsonObject) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"
