"""The answers of `POST /v1/responses`: items of text and of calls, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Final

from outrider.decoding.events import StreamEvent
from outrider.decoding.result import Result
from outrider.gateway.access import JSON
from outrider.gateway.errors import ErrorResponse, JsonObject, encode_json
from outrider.gateway.request_kind import SingleOutput
from outrider.gateway.request_parsing import ParsedRequest
from outrider.gateway.request_schema import MODEL
from outrider.gateway.response_building import StableText, TokenReports, outcome, visible_text
from outrider.gateway.responses_schema import ResponsesRequest
from outrider.gateway.tools import ToolOutput

_CUT: Final = {"reason": "max_output_tokens"}


class ResponsesAnswer(SingleOutput):
    """One response, as a body or as events. request: the original request, whose fields the response repeats."""

    media_type = JSON

    def __init__(self, request: ParsedRequest, sent: ResponsesRequest) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._request = request
        self._text = StableText(request.stop)
        self._tools = ToolOutput(request.tools, whole=not request.stream) if request.tools is not None else None
        self._tokens = TokenReports() if request.tokens else None
        self._items: list[JsonObject] = []  # only the last one may be in progress
        self._sequence = 0  # number of the next event
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": MODEL,
            "error": None,
            "instructions": sent.instructions,
            "max_output_tokens": request.settings["max_new_tokens"],
            "metadata": sent.metadata or {},
            "parallel_tool_calls": sent.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.settings["temperature"],
            "text": {"format": _format(sent)},
            "tool_choice": "auto" if sent.tool_choice is None else _dump(sent.tool_choice),
            "tools": [_dump(tool) for tool in sent.tools or []],
            "top_p": request.settings["top_p"],
            "truncation": "disabled",
        }

    def note(self, events: Sequence[StreamEvent]) -> None:
        """Process events of an answer that is sent as a whole."""
        if self._tokens is not None:
            self._tokens.add(events)

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer."""
        (result,) = results
        text = visible_text(result if self._tools is None else self._tools.with_special(result), self._request.stop)
        self._advance(text)
        self._finish(result)
        return encode_json(self._response(result))

    def chunk(self, events: Sequence[StreamEvent]) -> bytes:
        """Return the stream's events for these events of the generation, which may be empty."""
        self.note(events)
        text = self._text.add(events if self._tools is None else self._tools.add_special(events))
        return self._begin() + self._advance(text) if text else b""

    def last(self, result: Result) -> bytes:
        """Return the stream's last events."""
        rest = self._text.end(result if self._tools is None else self._tools.with_special(result))
        data = self._begin() + self._advance(rest) + self._finish(result)
        response = self._response(result)
        return data + self._event(f"response.{response['status']}", response=response)

    def error(self, response: ErrorResponse) -> bytes:
        """Return an error as the last event of a stream."""
        error = response.body()["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    # Items and their events ---------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        """Return the events before the first item, unless they were returned before."""
        if self._sequence:
            return b""
        response = {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _advance(self, text: str) -> bytes:
        deltas = [{"content": text}] if self._tools is None else self._tools.feed(text)
        return b"".join(self._add(delta) for delta in deltas)

    def _add(self, delta: JsonObject) -> bytes:
        """Add a delta of a chat to the items."""
        if text := delta.get("content"):
            data = b"" if self._is_open("message") else self._close("completed") + self._open_message()
            self._items[-1]["content"][0]["text"] += text
            return data + self._part_event("response.output_text.delta", delta=text, logprobs=[])
        data = b""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                data += self._close("completed") + self._open_call(call)
            if arguments := call["function"]["arguments"]:
                self._items[-1]["arguments"] += arguments
                data += self._item_event("response.function_call_arguments.delta", delta=arguments)
        return data

    def _finish(self, result: Result) -> bytes:
        """End the last item. Add an empty one if there is none."""
        deltas = [] if self._tools is None else self._tools.end()
        data = b"".join(self._add(delta) for delta in deltas)
        if not self._items:
            data += self._open_message()
        return data + self._close("incomplete" if result.finish_reason == "length" else "completed")

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"

    def _open_message(self) -> bytes:
        item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "status": "in_progress", "role": "assistant"}
        data = self._add_item({**item, "content": []})
        self._items[-1]["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        return data + self._part_event("response.content_part.added", part=self._items[-1]["content"][0])

    def _open_call(self, call: JsonObject) -> bytes:
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
        return self._add_item({**item, "name": call["function"]["name"], "arguments": "", "status": "in_progress"})

    def _add_item(self, item: JsonObject) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str) -> bytes:
        """End the last item, if it is in progress."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            data = self._part_event("response.output_text.done", text=part["text"], logprobs=[])
            data += self._part_event("response.content_part.done", part=part)
        else:
            fields = {"name": item["name"], "arguments": item["arguments"]}
            data = self._item_event("response.function_call_arguments.done", **fields)
        return data + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, kind: str, **fields: object) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        data = encode_json({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    # The whole ----------------------------------------------------------------------------------------------

    def _response(self, result: Result) -> JsonObject:
        is_cut = result.finish_reason == "length"
        warnings = self._tools.warnings(result.finish_reason) if self._tools is not None else []
        report = outcome(result, [*self._request.notes, *warnings])
        if self._tokens is not None:
            report["tokens"] = self._tokens.final[: len(result.token_ids)]
        status = {"status": "incomplete" if is_cut else "completed", "incomplete_details": _CUT if is_cut else None}
        return {**self._head, **status, "output": self._items, "usage": _usage(result), "outrider": report}


def _usage(result: Result) -> JsonObject:
    generated = len(result.token_ids)
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.stats.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": result.prompt_tokens + generated,
    }


def _format(sent: ResponsesRequest) -> object:
    given = sent.text.format if sent.text is not None else None
    return {"type": "text"} if given is None else given.model_dump(by_alias=True)


def _dump(value: object) -> object:
    return value.model_dump() if hasattr(value, "model_dump") else value
