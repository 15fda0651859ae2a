"""LlamaIndex: `OpenAILike` with the base URL of the server."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from llama_index.core.llms import AudioBlock, ChatMessage, MessageRole, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.drivers.protocol import Reply, Task, choice_after_call, reply, serve, weather


class LlamaIndexDriver:
    """Chats and streams with `OpenAILike`."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""
        return [model.id for model in self._model(task)._get_client().models.list()]

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer."""
        answer = self._model(task).chat(self._messages(task))
        return reply(answer.message.content, *self._usage(answer))

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""
        options = {"stream_options": {"include_usage": True}}
        *_, last = self._model(task, additional_kwargs=options).stream_chat(self._messages(task))
        return reply(last.message.content, *self._usage(last))

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""

        async def cancelled() -> str:
            first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def read() -> None:
                async for answer in await self._model(task).astream_chat(self._messages(task)):
                    if answer.delta and not first.done():
                        first.set_result(answer.delta)

            reading = asyncio.create_task(read())
            text = await first
            reading.cancel()
            await asyncio.wait([reading])
            return text

        return asyncio.run(cancelled())

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""
        return self._loop(task, self._model(task).chat_with_tools)

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""
        model = self._model(task)

        def ask(**request: Any) -> Any:
            *_, last = model.stream_chat_with_tools(**request)
            return last

        return self._loop(task, ask)

    def _loop(self, task: Task, ask: Any) -> Reply:
        tool, messages = FunctionTool.from_defaults(weather), self._messages(task)
        request = {"tools": [tool], "chat_history": messages, "allow_parallel_tool_calls": True}
        calling = ask(**request)
        selected = self._model(task).get_tool_calls_from_response(calling)
        messages.append(calling.message)
        for call in selected:
            result = tool(**call.tool_kwargs).content
            messages.append(
                ChatMessage(role=MessageRole.TOOL, content=result, additional_kwargs={"tool_call_id": call.tool_id})
            )
        calls = [[call.tool_name, call.tool_kwargs] for call in selected]
        return {"calls": calls, "answer": ask(**request, **choice_after_call(task)).message.content}

    def _model(self, task: Task, **options: Any) -> OpenAILike:
        kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
        limits = {"max_tokens": task.max_tokens, "max_retries": 0}
        return OpenAILike(api_base=task.url, api_key=task.key, model=task.model, **kind, **limits, **options)

    def _messages(self, task: Task) -> list[ChatMessage]:
        blocks: list[Any] = [TextBlock(text=task.prompt)]
        if task.sound is not None:
            blocks.append(AudioBlock(audio=base64.b64decode(task.sound), format="wav"))
        return [ChatMessage(role=MessageRole.USER, blocks=blocks)]

    def _usage(self, answer: Any) -> tuple[int, int]:
        return answer.raw.usage.prompt_tokens, answer.raw.usage.completion_tokens


if __name__ == "__main__":
    serve(LlamaIndexDriver())
