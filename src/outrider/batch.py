"""Batches: several prompts in one call, generated in several threads over a shared engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, wait
from typing import Any, TypeAlias, cast

from outrider.decoding.result import Result
from outrider.edge.cancellation import Cancellation
from outrider.engines.base import Engine
from outrider.engines.shared_engine import share
from outrider.errors import BatchError, PromptError
from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike
from outrider.prompts.tool_template import ToolChat
from outrider.verifiers.base import Verifier
from outrider.verifiers.local import LocalVerifier

# The concrete lists let a type checker accept a variable of such a type: a list[str] is no list[PromptLike].
Batch: TypeAlias = (
    list[str]
    | list[Audio]
    | list[list[int]]
    | list[list[dict[str, Any]]]
    | list[PromptLike]
    | tuple[str | Audio | list[int] | list[dict[str, Any]], ...]
)
_ITEM = (str, Audio, ToolChat, list, tuple)  # types of a whole prompt in a list. An int or a dict is a part of one


def as_batch(prompt: PromptLike | Batch) -> Seq[PromptLike] | None:
    """Return the prompts of a batch, or None if `prompt` is one prompt.

    A batch is a list or tuple of texts, recordings, and lists of token ids or messages. A list of token ids is one
    prompt, and so is a list of messages.

    Raises:
        PromptError: a batch has an item that is no prompt.
    """
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], _ITEM):
        return None
    for number, item in enumerate(prompt):
        if not isinstance(item, _ITEM):
            raise PromptError(
                f"prompts[0] is a prompt ({type(prompt[0]).__name__}), so this is a batch, but prompts[{number}] is "
                f"{type(item).__name__}: each is a text, Audio, a list of token ids or a list of messages"
            )
        if as_batch(item) is not None:
            raise PromptError(
                f"prompts[{number}] is a batch: each is a text, Audio, a list of token ids or a list of messages"
            )
    return cast(Seq[PromptLike], prompt)


def run_batch(
    executor: Executor, generate: Callable[[PromptLike, Cancellation], Result], prompts: Seq[PromptLike]
) -> list[Result]:
    """Return the results in the order of the prompts, after all generations have ended.

    An interruption of this thread, such as KeyboardInterrupt, cancels all generations.

    Raises:
        BatchError: a generation failed.
    """
    cancellations = [Cancellation() for _ in prompts]
    futures = [
        executor.submit(generate, prompt, cancellation)
        for prompt, cancellation in zip(prompts, cancellations, strict=True)
    ]
    try:
        wait(futures)
    except BaseException:
        for future, cancellation in zip(futures, cancellations, strict=True):
            future.cancel()
            cancellation.cancel()
        wait(futures)
        raise
    return check_results([future.exception() or future.result() for future in futures])


def check_results(outcomes: Seq[Result | BaseException]) -> list[Result]:
    """Return the results, or raise BatchError with all outcomes if one is an exception."""
    failures = {number: each for number, each in enumerate(outcomes) if isinstance(each, BaseException)}
    if not failures:
        return [each for each in outcomes if isinstance(each, Result)]
    first = min(failures)
    message = f"{len(failures)} of {len(outcomes)} prompts failed, first prompts[{first}]: {failures[first]}"
    raise BatchError(message, outcomes) from failures[first]


def share_engines(draft: Engine | None, verifier: Verifier | None) -> tuple[Engine | None, Verifier | None]:
    """Return drafter and verifier for several threads."""
    if isinstance(verifier, LocalVerifier):
        verifier = LocalVerifier(share(verifier.engine))
    return None if draft is None else share(draft), verifier
