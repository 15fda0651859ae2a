"""What the commands do, once their options are parsed."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.api import SpeculativeDecoder
from outrider.cli import view
from outrider.cli.options import (
    Decoding,
    Models,
    Network,
    Output,
    Speculation,
    assemble,
    build_decoder,
    check,
    closed_on_failure,
    collect_from_now_on,
    load_drafter,
)
from outrider.config import GenerationSettings
from outrider.core.outcome import Result
from outrider.core.text import Transcript
from outrider.engines.load import BUNDLED
from outrider.errors import AudioError, OutriderError, PromptError, SettingsError
from outrider.prompts import audio
from outrider.prompts.audio import Audio, Piece
from outrider.prompts.chat import check_text
from outrider.verifiers.base import disconnect
from outrider.verifiers.connect import connect

STDERR = Console(stderr=True)


def run_demo(
    cloud: Callable[[], str], speculation: Speculation, network: Network, decoding: Decoding, output: Output
) -> int:
    """`outrider demo`: the bundled clips, each in its own language, with a cloud of its own beside this process.

    cloud: waits until that one listens, and says where.
    """
    clips = json.loads((BUNDLED / "clips" / "clips.json").read_text(encoding="utf-8"))
    jobs = [
        Audio(BUNDLED / "clips" / clip["file"], lang=clip["lang"], task=("default", "detailed", "concise")[n % 3])
        for n, clip in enumerate(clips)
    ]
    titles = [f"{clip['file']}  “{clip['text']}”" for clip in clips]
    check(Models(cloud="grpc://127.0.0.1:1"), speculation, network)
    secured = [name for name in ("token_file", "tls", "ca", "cert", "key") if getattr(network, name)]
    if secured:
        raise SettingsError(f"--{secured[0].replace('_', '-')}: the demo's own cloud has no TLS and no tokens")

    def build() -> SpeculativeDecoder:
        draft = load_drafter(Models())  # before it waits for the cloud, which is loading too
        with closed_on_failure(connect(f"grpc://{cloud()}", **network.connection())) as verifier:
            return assemble(draft, verifier, speculation, network)

    return _caption_all(jobs, titles, build, decoding, output)


def run_caption(
    files: Sequence[str],
    lang: str,
    task: str,
    split: bool,
    models: Models,
    speculation: Speculation,
    network: Network,
    decoding: Decoding,
    output: Output,
) -> int:
    """`outrider caption`: every file is tried; those that cannot be used are named, and the exit code is then 1."""
    if not files:
        raise PromptError("no recording was given: outrider caption AUDIO…")
    check(models, speculation, network)
    jobs = [Audio(Path(name), task=task, lang=lang) for name in files]
    build = partial(build_decoder, models, speculation, network)
    return _caption_all(jobs, list(files), build, decoding, output, split=split)


def run_generate(
    prompt: str | None,
    prompt_ids: str | None,
    chat: bool,
    models: Models,
    speculation: Speculation,
    network: Network,
    decoding: Decoding,
    output: Output,
) -> int:
    """`outrider generate`."""
    given = _prompt(prompt, prompt_ids, chat)
    GenerationSettings.build(decoding.settings())
    with _loaded(partial(build_decoder, models, speculation, network), output) as decoder:
        if not _watched(output):
            _report(decoder.generate(given, **decoding.settings()), output, decoder)
        else:
            _print_table([("", _watch(decoder, given, decoding))])
    return 0


def _watch(decoder: SpeculativeDecoder, given: Any, decoding: Decoding) -> Result:
    """Generate on a terminal: tokens appear when they are drafted and take their colour when they are decided."""
    strip = view.Strip()
    stream = decoder.stream(given, **decoding.settings())
    with Live(console=Console(), vertical_overflow="visible", refresh_per_second=10) as live:
        shown: Any = ""
        while True:
            try:
                strip.take(next(stream))
            except StopIteration as end:
                result: Result = end.value
                live.update(view.coloured(pieces(decoder, result), result.sources))
                return result
            text = strip.text
            live.update(text, refresh=not shown)  # the first one at once, others ten times a second
            shown = text


def _watched(output: Output) -> bool:
    """Whether someone looks at stdout, who can be shown tokens as they come."""
    return not output.json and Console().is_terminal


def _prompt(text: str | None, ids: str | None, chat: bool) -> Any:
    if text is not None and ids is not None:
        raise PromptError("give the prompt as text or as --prompt-ids, not both")
    if ids is not None:
        if chat:
            raise PromptError("--chat wraps a text; --prompt-ids are taken as they are")
        return _parse_ids(ids)
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise PromptError("no prompt was given: as an argument, as --prompt-ids, or on standard input")
        text = sys.stdin.read()
    if not text:
        raise PromptError("the prompt is empty")
    check_text(text)
    return [{"role": "user", "content": text}] if chat else text


def _parse_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise PromptError(f'--prompt-ids {text!r}: expected whole numbers, as in "1 2 3"') from None
    if not ids:
        raise PromptError("--prompt-ids names no token")
    return ids


# Captions ---------------------------------------------------------------------------------------------------


def _caption_all(
    jobs: Sequence[Audio],
    titles: Sequence[str],
    build: Callable[[], SpeculativeDecoder],
    decoding: Decoding,
    output: Output,
    *,
    split: bool = False,
) -> int:
    GenerationSettings.build(decoding.settings())
    failures = {n: error for n, job in enumerate(jobs) if (error := _unusable(job)) is not None}
    with ExitStack() as closing:
        decoder = None
        if len(failures) < len(jobs):
            decoder = closing.enter_context(_loaded(build, output))
            decoder.check_hears()
        done = _caption_each(jobs, titles, failures, decoder, decoding, output, split=split)
    if done and not output.json:
        _print_table(done)
    return 1 if failures else 0


def _caption_each(
    jobs: Sequence[Audio],
    titles: Sequence[str],
    failures: dict[int, OutriderError],
    decoder: SpeculativeDecoder | None,
    decoding: Decoding,
    output: Output,
    *,
    split: bool,
) -> list[tuple[str, Result]]:
    """Caption and print what can be captioned; failures gains the rest."""
    done: list[tuple[str, Result]] = []
    alone = len(jobs) < 2 or _watched(output)  # beside tokens that appear a bar would flicker
    with progress("captions", 0 if alone else len(jobs)) as advance:
        for n, (job, title) in enumerate(zip(jobs, titles, strict=True)):
            if n not in failures and decoder is not None:
                try:
                    for piece in audio.split(job, decoder.audio_seconds) if split else (None,):
                        result = _caption(job, printable(title), decoder, decoding, output, piece)
                        done.append((printable(Path(str(job.source)).name) + _times(piece), result))
                except OutriderError as error:
                    failures[n] = error
            if n in failures:
                _print_failure(job, failures[n], output)
            advance()
    return done


def _unusable(job: Audio) -> OutriderError | None:
    """What is wrong with a recording, found before any model is loaded."""
    try:
        audio.read(job)
    except AudioError as error:
        return error
    return None


def _times(piece: Piece | None) -> str:
    """The place of a piece, as in " 0:30–1:00"."""
    if piece is None:
        return ""
    start, end = (f"{int(seconds) // 60}:{seconds % 60:04.1f}" for seconds in (piece.start, piece.end))
    return f" {start}–{end}"


def _caption(
    job: Audio,
    title: str,
    decoder: SpeculativeDecoder,
    decoding: Decoding,
    output: Output,
    piece: Piece | None = None,
) -> Result:
    """Caption a recording, or a piece of it, and print what comes: on a terminal each token when it is there."""
    console, prompt, title = Console(), job if piece is None else piece.audio, title + _times(piece)
    if _watched(output):
        view.show_title(console, title)
        result = _watch(decoder, prompt, decoding)
        view.show_warnings(console, result)
    else:
        result = decoder.generate(prompt, **decoding.settings())
        if output.json:
            where = {} if piece is None else {"start_s": round(piece.start, 3), "end_s": round(piece.end, 3)}
            print_json({"file": str(job.source), **where, "lang": job.lang, "task": job.task, **result.to_json()})
            return result
        view.show(console, title, pieces(decoder, result), result)
    console.print()
    return result


def _print_failure(job: Audio, error: OutriderError, output: Output) -> None:
    STDERR.print(f"outrider: {printable(str(error))}", markup=False, highlight=False, soft_wrap=True)
    if output.json:
        print_json({"file": str(job.source), "error": {"type": type(error).__name__, "message": str(error)}})


# Output -----------------------------------------------------------------------------------------------------


def _report(result: Result, output: Output, decoder: SpeculativeDecoder) -> None:
    if output.json:
        print_json(result.to_json())
        return
    view.show(Console(), "", pieces(decoder, result), result)
    Console().print()
    _print_table([("", result)])


def _print_table(done: list[tuple[str, Result]]) -> None:
    console = Console()
    console.print(view.legend(source for _, result in done for source in result.sources))
    console.print(view.table(done))


def print_json(value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    print(text.encode("utf-8", "backslashreplace").decode(), flush=True)  # noqa: T201


def printable(name: str) -> str:
    """A file's name as it can be shown: without control sequences, and without bytes that are no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def pieces(decoder: SpeculativeDecoder, result: Result) -> list[str]:
    """The text of each token of a result; without a tokenizer, its id."""
    if decoder.tokenizer is None:
        return [f"{token} " for token in result.token_ids]
    transcript = Transcript(decoder.decode)
    for token in result.token_ids:
        transcript.push(token)
    if transcript.pieces:
        transcript.pieces[-1] += transcript.flush()
    return transcript.pieces


# Set-up -----------------------------------------------------------------------------------------------------


@contextmanager
def _loaded(build: Callable[[], SpeculativeDecoder], output: Output) -> Iterator[SpeculativeDecoder]:
    """The decoder; at the end the cloud, if it is across a network, is told that nobody comes back."""
    quieten(output)
    with STDERR.status("loading models") if STDERR.is_terminal else _nothing():
        decoder = build()
    collect_from_now_on()
    STDERR.print(decoder.summary(), style="dim", markup=False, highlight=False, soft_wrap=True)
    try:
        yield decoder
    finally:
        disconnect(decoder.verifier)


def quieten(output: Output) -> None:
    """Logs on stderr: warnings, and all of our own with --verbose; the model library's bars and remarks then, too."""
    from transformers.utils import logging as transformers_logging

    logging.basicConfig(
        level=logging.WARNING, handlers=[RichHandler(console=STDERR, show_path=False)], format="%(message)s"
    )
    logging.getLogger("outrider").setLevel(logging.DEBUG if output.verbose else logging.NOTSET)
    if not output.verbose:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], Any]]:
    """A bar on stderr for people who watch, unless there is nothing to do; what it yields moves it on by one."""
    if not total or not STDERR.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=STDERR, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
