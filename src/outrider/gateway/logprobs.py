"""Log-probabilities in answers, in the two forms of OpenAI's API: of chats and of plain completions.

Each entry has a `source` beside OpenAI's fields: the log-probabilities of the sources `edge` and `sampled` are the
drafter's, all others the target's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from outrider.api import StreamEvent
from outrider.decoding.result import Result
from outrider.decoding.sequence import Source
from outrider.decoding.token_logprob import TokenLogprob
from outrider.gateway.errors import JsonObject

LEAST: Final = -9999.0  # lower limit, which replaces −∞, as with OpenAI and vLLM

_Entry = tuple[TokenLogprob, str, Source]  # the token, its text in the output, and its source


class LogprobReports:
    """Collects the log-probabilities of one choice from its events. chat: use the form of chats."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._entries: list[_Entry] = []
        self._num_taken = 0
        self._offset = 0  # characters of the text before the next token

    def add(self, events: Seq[StreamEvent]) -> JsonObject | None:
        """Process events, and return the report on the tokens that became final, or None."""
        settled = self._num_taken
        for event in events:
            if event.kind == "provisional":
                continue
            if event.kind == "revised":
                del self._entries[event.index :]
            if event.logprob is not None:
                entry = event.logprob, event.text, event.source
                self._entries[event.index : event.index + 1] = [entry]
            settled = max(settled, event.settled)
        return self._take(self._entries[self._num_taken : settled])

    def end(self, result: Result) -> JsonObject | None:
        """Return the report on the rest of the tokens, or None."""
        whole = list(zip(result.logprobs, result.pieces, result.sources, strict=True))
        return self._take(whole[self._num_taken :])

    def _take(self, entries: Seq[_Entry]) -> JsonObject | None:
        if not entries:
            return None
        self._num_taken += len(entries)
        if self._chat:
            return {"content": [_chat_entry(*entry) for entry in entries], "refusal": None}
        offsets = []
        for _, text, _ in entries:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [_name(each) for each, _, _ in entries],
            "token_logprobs": [_value(each) for each, _, _ in entries],
            "top_logprobs": [{_name(one): _value(one) for one in (*each.top, each)} for each, _, _ in entries],
            "text_offset": offsets,
            "sources": [source.value for _, _, source in entries],
        }


def _chat_entry(found: TokenLogprob, _: str, source: Source) -> JsonObject:
    return {**_describe(found), "top_logprobs": [_describe(each) for each in found.top], "source": source.value}


def _describe(found: TokenLogprob) -> JsonObject:
    data = None if found.data is None else list(found.data)
    return {"token": found.text, "logprob": _value(found), "bytes": data}


def _value(found: TokenLogprob) -> float:
    return max(found.logprob, LEAST)


def _name(found: TokenLogprob) -> str:
    """Return the token's text, or OpenAI's form of bytes that are not a whole character, such as `bytes:\\xe7`."""
    try:
        return (found.data or b"").decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found.data or b"")
