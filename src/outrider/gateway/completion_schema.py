"""Schema of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from outrider.gateway.request_schema import MAX_PROMPTS, UNSUPPORTED, Choices, Request, TopLogprobsCount

Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def _prompt_kind(value: object) -> str:
    """Return the tag of a prompt's form, by its type and the type of its first item."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "id lists" if isinstance(first, list) else "ids"


class CompletionRequest(Request):
    """`POST /v1/completions`. prompt: a text, token ids, or a list of either. Each has choices of its own."""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[IdLists, Tag("id lists")],
        Discriminator(_prompt_kind),
    ]
    best_of: Choices | None = Field(default=None, description="generations, of which the n likeliest are returned")
    echo: bool | None = Field(default=None, description="begin the answer's text with the prompt")
    logprobs: TopLogprobsCount | None = Field(
        default=None, description="report the log-probability of each token and of this many of the most probable ones"
    )
    suffix: Annotated[Literal[""] | None, Field(description=UNSUPPORTED["suffix"])] = None
