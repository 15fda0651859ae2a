"""`POST /v1/audio/transcriptions`: captions of an uploaded file, with the fields of OpenAI's transcriptions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from outrider.decoding.events import StreamEvent
from outrider.decoding.result import Result
from outrider.errors import AudioError
from outrider.gateway.access import JSON, MULTIPART
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import ErrorResponse, JsonObject, RequestError, encode_json, with_param
from outrider.gateway.multipart import FormField, parse_form
from outrider.gateway.prompt_size import measure_prompt
from outrider.gateway.recordings import decode_file
from outrider.gateway.request_kind import Output, RequestKind, SingleOutput
from outrider.gateway.request_parsing import ParsedRequest, parse_json, parse_request, validate
from outrider.gateway.request_schema import MODEL, ChatRequest, OutriderOptions, StrictModel
from outrider.gateway.response_building import StableText, encode_event, outcome, visible_text
from outrider.prompts.audio import Audio

_NO_TIMES: Final = "the models generate no timestamps"
_NO_FILE: Final = "expected an uploaded file, not a text: a file has a file name in its Content-Disposition"
_UNSUPPORTED: Final = {
    "timestamp_granularities": _NO_TIMES,
    "include": "only chat completions and completions report log-probabilities",
    "chunking_strategy": "a recording is read as a whole: send it in pieces",
    "known_speaker_names": "the models do not distinguish speakers",
    "known_speaker_references": "the models do not distinguish speakers",
}
_FORMATS: Final = "response_format: not supported: only json, text and verbose_json, because " + _NO_TIMES


class TranscriptionRequest(StrictModel):
    """The form of `POST /v1/audio/transcriptions`. Its texts are converted to the types of the fields."""

    model_config = ConfigDict(strict=False)

    file: bytes = Field(description="the recording, of a format of input_audio", json_schema_extra={"format": "binary"})
    model: str = Field(description="the one of GET /v1/models", json_schema_extra={"enum": [MODEL]})
    language: Literal["en", "zh"] | None = Field(default=None, description="the caption's language")
    prompt: str | None = Field(default=None, description="a question about the recording, instead of a caption")
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0)] | None = Field(default=None, description="0, greedy, by default")
    stream: bool | None = None
    outrider: str | None = Field(default=None, description="the field outrider of chats, as JSON")


def _prepare(body: bytes, content_type: str, defaults: Defaults) -> tuple[ParsedRequest, Output]:
    form = parse_form(body, content_type)
    request = validate(TranscriptionRequest, _field_values(form))
    if not form["file"].is_file or not request.file:
        reason = "the file is empty" if form["file"].is_file else _NO_FILE
        raise RequestError(f"file: {reason}", param="file", code="invalid_value")
    if not defaults.audio_seconds:
        raise RequestError(defaults.audio_refusal, param="file")
    if request.stream and request.response_format != "json":
        raise RequestError(f"stream: not supported with response_format {request.response_format}", param="stream")
    parsed, task, lang = _parse_options(request, defaults)
    try:
        recording = decode_file(request.file, defaults.audio_seconds)
    except AudioError as error:
        raise with_param(error, "file") from error
    audio = Audio(recording.waveform, task, lang, instruction=request.prompt or None, warnings=recording.warnings)
    fields = ("prompt" if request.prompt else "file",)
    parsed = replace(
        parsed,
        prompt=audio,
        fields=fields,
        recording_field="file",
        prompt_bytes=(measure_prompt(audio),),
        rename=_rename,
    )
    return parsed, TranscriptionOutput(parsed, request.response_format, lang, recording.seconds)


TRANSCRIPTION: Final = RequestKind(_prepare, MULTIPART)


def _parse_options(request: TranscriptionRequest, defaults: Defaults) -> tuple[ParsedRequest, str, str]:
    """Return the request parsed as a chat without its recording, the caption task, and the language.

    Raises:
        RequestError: an option is invalid, not supported here, or contradicts another field.
    """
    options = parse_json(request.outrider.encode(), "outrider") if request.outrider is not None else {}
    fields = {"temperature": request.temperature, "stream": request.stream, "outrider": options}
    messages = [{"role": "user", "content": "the recording"}]
    chat = validate(ChatRequest, {"model": request.model, "messages": messages, **fields})
    given = chat.outrider or OutriderOptions()
    for name in ("tokens", "provisional"):
        if getattr(given, name):
            message = f"outrider.{name}: transcriptions do not report tokens: use chat completions"
            raise RequestError(message, param=f"outrider.{name}", code="unsupported")
    if request.prompt and (request.language or given.task or given.lang):
        message = (
            "prompt: a question replaces language, outrider.task and outrider.lang: leave them out, or leave out prompt"
        )
        raise RequestError(message, param="prompt")
    if None not in (request.language, given.lang) and request.language != given.lang:
        message = f"language {request.language} and outrider.lang {given.lang} contradict each other: give one"
        raise RequestError(message, param="outrider.lang")
    without = given.model_copy(update={"task": None, "lang": None})
    parsed = parse_request(chat.model_copy(update={"outrider": without}), defaults)
    return parsed, given.task or "default", given.lang or request.language or "en"


def _rename(text: str) -> str:
    """Return a text about the chat with the field names of the form."""
    return text.replace("messages.0.content", "prompt")


def _field_values(form: dict[str, FormField]) -> JsonObject:
    """Return the fields' values for validation: texts, and the bytes of the file."""
    values: JsonObject = {}
    for name, field in form.items():
        if (reason := _UNSUPPORTED.get(name.partition("[")[0])) is not None:
            raise RequestError(f"{name}: not supported: {reason}", param=name, code="unsupported")
        try:
            values[name] = field.data if name == "file" else field.data.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"{name}: not UTF-8", param=name, code="invalid_value") from error
    if values.get("response_format") in ("srt", "vtt", "diarized_json"):
        raise RequestError(_FORMATS, param="response_format", code="unsupported")
    return values


class TranscriptionOutput(SingleOutput):
    """One caption, as a body or as events. seconds: the length of the recording."""

    def __init__(self, request: ParsedRequest, kind: str, language: str, seconds: float) -> None:
        self.id = f"transcription-{uuid.uuid4().hex}"
        self.media_type = "text/plain; charset=utf-8" if kind == "text" else JSON
        self._request, self._kind, self._language, self._seconds = request, kind, language, seconds
        self._text = StableText()

    def note(self, events: Sequence[StreamEvent]) -> None:
        """Process events of an answer that is sent as a whole."""

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer."""
        (result,) = results
        text = visible_text(result, ())
        if self._kind == "text":
            return text.encode("utf-8", "backslashreplace")
        more: dict[str, Any] = {}
        if self._kind == "verbose_json":
            more = {"task": "transcribe", "language": self._language, "duration": round(self._seconds, 3)}
        report = outcome(result, self._request.notes)
        return encode_json({"text": text, **more, "usage": _usage(result), "outrider": report})

    def chunk(self, events: Sequence[StreamEvent]) -> bytes:
        """Return the stream's chunks for these events, which may be empty."""
        text = self._text.add(events)
        return encode_event({"type": "transcript.text.delta", "delta": text}) if text else b""

    def last(self, result: Result) -> bytes:
        """Return the event with the rest of the text, and the one with the whole text."""
        rest = self._text.end(result)
        data = encode_event({"type": "transcript.text.delta", "delta": rest}) if rest else b""
        done = {"type": "transcript.text.done", "text": visible_text(result, ()), "usage": _usage(result)}
        return data + encode_event({**done, "outrider": outcome(result, self._request.notes)})

    def error(self, response: ErrorResponse) -> bytes:
        """Return an error as the last event of a stream, which OpenAI's clients raise."""
        return encode_event(response.body())


def _usage(result: Result) -> JsonObject:
    generated = len(result.token_ids)
    counts = {"input_tokens": result.prompt_tokens, "output_tokens": generated}
    return {"type": "tokens", **counts, "total_tokens": result.prompt_tokens + generated}
