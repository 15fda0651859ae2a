"""`outrider generate`, once its options are parsed."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from outrider.cli import rendering
from outrider.cli.build import build_decoder
from outrider.cli.loading import Loading, describe_models, loaded_decoder
from outrider.cli.options import Run
from outrider.cli.terminal import STDERR, print_json
from outrider.config import GenerationSettings
from outrider.errors import PromptError, quote
from outrider.files import decode_text
from outrider.prompts.chat import check_text


def run_generate(
    prompt: str | None, prompt_ids: str | None, chat: bool, run: Run, *, target_tokenizer: str | None = None
) -> int:
    """Run `outrider generate`: decode one prompt and print its output."""
    model_input = _prompt(prompt, prompt_ids, chat)
    settings, output = run.decoding.settings(), run.output
    GenerationSettings.build(settings)
    for_text = prompt_ids is None
    build = partial(build_decoder, run, watch=output.verbose, for_text=for_text, target_tokenizer=target_tokenizer)
    with loaded_decoder(Loading(build, describe_models(run.models)), output) as decoder:
        if for_text:  # for a hub id only the loaded model shows whether it accepts text
            decoder.check_accepts_text()
        if rendering.is_interactive(output):
            result = rendering.stream_to_terminal(decoder, model_input, settings)
        else:
            result = decoder.generate(model_input, **settings)
            if output.json:
                print_json(result.to_json())
                return 0
            rendering.print_text("", result)
        rendering.show_warnings(STDERR, result)
        rendering.print_summary([("", result)])
    return 0


def _prompt(text: str | None, ids: str | None, chat: bool) -> Any:
    if text is not None and ids is not None:
        raise PromptError("give the prompt as text or as --prompt-ids, not both")
    if ids is not None:
        if chat:
            raise PromptError("--chat applies to a text, not to --prompt-ids: leave one of them out")
        return _parse_ids(ids)
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise PromptError("no prompt was given: as an argument, as --prompt-ids, or on standard input")
        text = decode_text(sys.stdin.buffer.read(), "standard input")
    text = (text or "").removeprefix("\ufeff")
    if not text:
        raise PromptError("the prompt is empty")
    check_text(text)
    return [{"role": "user", "content": text}] if chat else text


def _parse_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise PromptError(f'--prompt-ids {quote(text)}: expected whole numbers, as in "1 2 3"') from None
    if not ids:
        raise PromptError('--prompt-ids is empty: expected whole numbers, as in "1 2 3"')
    return ids
