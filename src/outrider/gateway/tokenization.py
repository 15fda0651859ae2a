"""`POST /tokenize` and `/detokenize`: the tokens of a prompt and the text of tokens, in vLLM's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.decoding.detokenizer import get_detokenizer
from outrider.engines.vocabulary import tokenize
from outrider.errors import PromptError
from outrider.gateway.completion_schema import Ids
from outrider.gateway.defaults import Defaults
from outrider.gateway.error_params import place_of
from outrider.gateway.errors import JsonObject, RequestError, with_param
from outrider.gateway.request_parsing import parse_json, validate
from outrider.gateway.request_prompts import build_chat
from outrider.gateway.request_schema import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Message, StrictModel, Tool
from outrider.gateway.tools import read_tools
from outrider.prompts.chat import check_text, encode


class TokenizeRequest(StrictModel):
    """`POST /tokenize`: either a text, or a conversation, which is tokenised as in a chat request."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(default=None, description="of a text, true by default")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids


class Tokenization:
    """The tokenizer of the model that encodes prompts. engine: that model.

    max_length: returns the most positions of prompt and output together, None without a limit.
    """

    def __init__(self, engine: Any, max_length: Callable[[], int | None]) -> None:
        self._engine, self._max_length = engine, max_length

    def tokenize(self, body: bytes, defaults: Defaults) -> JsonObject:
        """Return the tokens of a prompt.

        Raises:
            RequestError: the request or its prompt is invalid, or the model has no tokenizer or chat template.
        """
        request = validate(TokenizeRequest, parse_json(body))
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt", code="invalid_value")
        try:
            ids = self._messages(request, defaults) if request.messages is not None else self._text(request)
        except PromptError as error:
            field = "messages" if request.messages is not None else "prompt"
            raise with_param(error, place_of(error) or field) from error
        names = self._tokenizer().convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._max_length(), "tokens": ids, "token_strs": names}

    def detokenize(self, body: bytes, _: Defaults) -> JsonObject:
        """Return the text of tokens, special ones included.

        Raises:
            RequestError: the request is invalid, an id is outside the vocabulary, or the model has no tokenizer.
        """
        request = validate(DetokenizeRequest, parse_json(body))
        return {"prompt": self.decode(request.tokens)}

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            RequestError: an id is outside the vocabulary, or the model has no tokenizer.
        """
        size = self._engine.vocab_size
        if (outside := next((token for token in ids if token >= size), None)) is not None:
            raise RequestError(f"token id {outside} is outside the vocabulary (0 to {size - 1})", param="tokens")
        return get_detokenizer(self._tokenizer())(ids)

    def _text(self, request: TokenizeRequest) -> list[int]:
        text = request.prompt or ""
        check_text(text)
        if request.add_special_tokens is False:
            return tokenize(self._tokenizer(), text, add_special_tokens=False)
        return list(encode(self._engine, text).ids) if text else tokenize(self._tokenizer(), text)

    def _messages(self, request: TokenizeRequest, defaults: Defaults) -> list[int]:
        assert request.messages is not None  # checked by the caller
        chat = ChatRequest.model_construct(messages=request.messages, tools=request.tools)
        return list(encode(self._engine, build_chat(chat, read_tools(chat, defaults.tools))).ids)

    def _tokenizer(self) -> Any:
        if self._engine.tokenizer is None:
            raise RequestError(f"{self._engine.name} came without a tokenizer", code="unsupported")
        return self._engine.tokenizer
