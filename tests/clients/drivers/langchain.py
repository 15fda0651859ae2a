"""LangChain: `ChatOpenAI` with the base URL of the server."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.drivers import protocol
from tests.clients.drivers.protocol import Reply, Task, choice_after_call, reply, serve


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return protocol.weather(city)


class LangChainDriver:
    """Chats and streams with `ChatOpenAI`."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""
        return [model.id for model in self._model(task).root_client.models.list()]

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer."""
        answer = self._model(task).invoke(self._messages(task))
        return reply(answer.text, answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"])

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""
        whole: Any = None
        for chunk in self._model(task, stream_usage=True).stream(self._messages(task)):
            whole = chunk if whole is None else whole + chunk
        return reply(whole.text, whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"])

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""
        stream = self._model(task).stream(self._messages(task))
        text = next(chunk.text for chunk in stream if chunk.text)
        stream.close()
        return str(text)

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""
        model = self._model(task).bind_tools([weather])
        return self._loop(task, model.invoke)

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""
        model = self._model(task).bind_tools([weather])

        def invoke(messages: list[BaseMessage], **options: str) -> Any:
            whole: Any = None
            for chunk in model.stream(messages, **options):
                whole = chunk if whole is None else whole + chunk
            return whole

        return self._loop(task, invoke)

    def _loop(self, task: Task, invoke: Any) -> Reply:
        messages = self._messages(task)
        calling = invoke(messages)
        messages += [calling, *(weather.invoke(call) for call in calling.tool_calls)]
        calls = [[call["name"], call["args"]] for call in calling.tool_calls]
        return {"calls": calls, "answer": invoke(messages, **choice_after_call(task)).text}

    def _model(self, task: Task, **options: Any) -> ChatOpenAI:
        limits = {"max_tokens": task.max_tokens, "max_retries": 0}
        return ChatOpenAI(base_url=task.url, api_key=task.key, model=task.model, **limits, **options)

    def _messages(self, task: Task) -> list[BaseMessage]:
        if task.sound is None:
            return [HumanMessage(task.prompt)]
        sound = {"type": "audio", "base64": task.sound, "mime_type": "audio/wav"}
        return [HumanMessage([{"type": "text", "text": task.prompt}, sound])]


if __name__ == "__main__":
    serve(LangChainDriver())
