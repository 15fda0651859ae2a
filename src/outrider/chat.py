"""Conversations: chat turns with a history."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol

from outrider.aio import AsyncStream
from outrider.decoding.events import StreamEvent
from outrider.decoding.result import Result
from outrider.errors import PromptError, StateError
from outrider.prompts.chat_template import Messages

Message = dict[str, Any]


class Generates(Protocol):
    """The part of `SpeculativeDecoder` that a conversation uses."""

    def generate(self, prompt: Messages, **settings: Any) -> Result:
        """Generate to the end."""
        ...

    def agenerate(self, prompt: Messages, **settings: Any) -> Awaitable[Result]:
        """Generate to the end, in asyncio."""
        ...

    def stream(self, prompt: Messages, **settings: Any) -> Generator[StreamEvent, None, Result]:
        """Generate and yield events."""
        ...

    def astream(self, prompt: Messages, **settings: Any) -> AsyncStream:
        """Generate and yield events, in asyncio."""
        ...


class Conversation:
    """A conversation with the models of a decoder, from `SpeculativeDecoder.chat`.

    Each turn sends the whole history through the tokenizer's chat template. The history grows when an answer is
    complete: a turn that fails, is cancelled or is not read to its end leaves it unchanged. One turn runs at a time.

    system: the first message, or None. messages: an earlier history. settings: the fields of `GenerationSettings` for
    all turns, which a turn can override.

    result: the `Result` of the last turn that ended, or None.

    Raises:
        PromptError: the system prompt or a message is not valid.
    """

    def __init__(
        self, decoder: Generates, system: str | None = None, messages: Messages = (), **settings: object
    ) -> None:
        if not isinstance(messages, Seq) or not all(isinstance(message, dict) for message in messages):
            raise PromptError("messages: a history is a list of messages, which are dictionaries")
        if system is not None and messages and messages[0].get("role") == "system":
            raise PromptError("system: the messages already begin with a system message: leave out one of them")
        opening = [] if system is None else [{"role": "system", "content": _check_text("system", system)}]
        self._decoder, self._settings = decoder, settings
        self._messages: list[Message] = [*opening, *deepcopy(list(messages))]
        self._is_running = False
        self.result: Result | None = None

    @property
    def messages(self) -> list[Message]:
        """A copy of the history: dictionaries with `role` and `content`."""
        return deepcopy(self._messages)

    def send(self, text: str, **settings: object) -> Result:
        """Generate the answer to `text` and append both to the history.

        Raises: as `SpeculativeDecoder.generate`, and
            StateError: another turn is unfinished.
        """
        with self._turn() as base:
            return self._answer(base, text, settings)

    async def asend(self, text: str, **settings: object) -> Result:
        """Do as `send`, in asyncio. The cancellation of the awaiting task cancels the turn."""
        with self._turn() as base:
            result = await self._decoder.agenerate(_ask(base, text), **{**self._settings, **settings})
            self._append(base, text, result)
            return result

    def stream(self, text: str, **settings: object) -> Generator[StreamEvent, None, Result]:
        """Do as `send`, but yield the events of the answer. The generator's return value is the `Result`.

        Raise at once, as `send` does, except for StateError, which the iteration raises.
        """
        base = list(self._messages)
        events = self._decoder.stream(_ask(base, text), **{**self._settings, **settings})
        return self._stream(base, text, events)

    def _stream(
        self, base: list[Message], text: str, events: Generator[StreamEvent, None, Result]
    ) -> Generator[StreamEvent, None, Result]:
        with self._turn() as current:
            if current != base:
                raise StateError("the conversation has changed since this stream was made: make a new stream")
            result = yield from events
            self._append(base, text, result)
        return result

    async def astream(self, text: str, **settings: object) -> AsyncGenerator[StreamEvent, None]:
        """Do as `stream`, in asyncio. The result is in `result` after the last event.

        Raise all errors in the iteration. Use `contextlib.aclosing` for a loop that may end early.
        """
        with self._turn() as base:
            async with self._decoder.astream(_ask(base, text), **{**self._settings, **settings}) as stream:
                async for event in stream:
                    yield event
            self._append(base, text, stream.result)

    def undo(self) -> list[Message]:
        """Remove the last turn: the user's last message and all after it. Return these messages.

        Raises:
            StateError: there is no turn, or one is unfinished.
        """
        with self._turn() as base:
            start = _last_turn(base)
            self._messages = base[:start]
            return base[start:]

    def edit(self, text: str, **settings: object) -> Result:
        """Replace the last turn by `text` and its answer. If that fails, the last turn stays.

        Raises: as `undo` and `send`.
        """
        with self._turn() as base:
            return self._answer(base[: _last_turn(base)], text, settings)

    def _answer(self, base: list[Message], text: str, settings: dict[str, object]) -> Result:
        result = self._decoder.generate(_ask(base, text), **{**self._settings, **settings})
        self._append(base, text, result)
        return result

    @contextmanager
    def _turn(self) -> Iterator[list[Message]]:
        """Yield the history at the start of a turn. Only one turn runs at a time."""
        if self._is_running:
            raise StateError("another turn of this conversation is unfinished: wait for its end, or close its stream")
        self._is_running = True
        try:
            yield list(self._messages)
        finally:
            self._is_running = False

    def _append(self, base: list[Message], text: str, result: Result) -> None:
        self._messages = [*_ask(base, text), {"role": "assistant", "content": result.text or ""}]
        self.result = result


def _ask(base: list[Message], text: str) -> list[Message]:
    return [*base, {"role": "user", "content": _check_text("a turn", text)}]


def _last_turn(messages: list[Message]) -> int:
    """Return the index of the user's last message."""
    numbers = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    if not numbers:
        raise StateError("the conversation has no turn: send a text first")
    return numbers[-1]


def _check_text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise PromptError(f"{name} of a conversation is a text, not {type(text).__name__}")
    return text
