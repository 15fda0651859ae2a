"""pydantic-ai: an `Agent` with an `OpenAIChatModel`."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from pydantic_ai import Agent, BinaryContent
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.drivers.protocol import Reply, Task, reply, serve, weather


class PydanticAIDriver:
    """Chats and streams with an `Agent`."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""

        async def listed() -> list[str]:
            return [model.id async for model in self._provider(task).client.models.list()]

        return asyncio.run(listed())

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer."""
        answer = self._agent(task).run_sync(self._prompt(task))
        return reply(answer.output, answer.usage.input_tokens, answer.usage.output_tokens)

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""

        async def streamed() -> Reply:
            async with self._agent(task).run_stream(self._prompt(task)) as run:
                text = "".join([delta async for delta in run.stream_text(delta=True)])
                return reply(text, run.usage.input_tokens, run.usage.output_tokens)

        return asyncio.run(streamed())

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""

        async def cancelled() -> str:
            first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def run() -> None:
                async with self._agent(task).run_stream(self._prompt(task)) as stream:
                    async for delta in stream.stream_text(delta=True):
                        if not first.done():
                            first.set_result(delta)

            running = asyncio.create_task(run())
            text = await first
            running.cancel()
            await asyncio.wait([running])
            return text

        return asyncio.run(cancelled())

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""
        run = self._agent(task, tools=[weather]).run_sync(task.prompt)
        return {"calls": self._calls(run), "answer": run.output}

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""

        async def streamed() -> Reply:
            async with self._agent(task, tools=[weather]).run_stream(task.prompt) as run:
                return {"answer": await run.get_output(), "calls": self._calls(run)}

        return asyncio.run(streamed())

    def _calls(self, run: Any) -> list[Any]:
        parts = [part for message in run.all_messages() for part in message.parts]
        return [[part.tool_name, part.args_as_dict()] for part in parts if isinstance(part, ToolCallPart)]

    def _provider(self, task: Task) -> OpenAIProvider:
        return OpenAIProvider(base_url=task.url, api_key=task.key)

    def _agent(self, task: Task, **options: Any) -> Agent[None, str]:
        model = OpenAIChatModel(task.model, provider=self._provider(task))
        return Agent(model, model_settings={"max_tokens": task.max_tokens}, **options)

    def _prompt(self, task: Task) -> Any:
        if task.sound is None:
            return task.prompt
        return [task.prompt, BinaryContent(base64.b64decode(task.sound), media_type="audio/wav")]


if __name__ == "__main__":
    serve(PydanticAIDriver())
