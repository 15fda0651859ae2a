"""What the commands do, once their options are parsed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from outrider.api import SpeculativeDecoder
from outrider.cli import interrupts, rendering
from outrider.cli.escape import escape_controls, one_line
from outrider.cli.loading import Loading, describe_models
from outrider.cli.options import (
    Decoding,
    Models,
    Network,
    Output,
    Speculation,
    build_decoder,
    build_options,
    check,
    check_accepts_text,
    closed_on_failure,
    enable_gc,
    load_drafter,
)
from outrider.cli.terminal import STDERR, LogHandler, print_json, print_message, stdout
from outrider.config import GenerationSettings
from outrider.decoding.gain import CloudBaseline, Gain
from outrider.decoding.incremental_text import IncrementalDetokenizer
from outrider.decoding.result import Result
from outrider.engines.load import BUNDLED
from outrider.errors import AudioError, OutriderError, PromptError, SettingsError
from outrider.files import decode_text, read_json
from outrider.prompts import audio
from outrider.prompts.audio import Audio, Piece
from outrider.prompts.chat import check_text
from outrider.verifiers.base import disconnect
from outrider.verifiers.connect import connect

WARM_UP = 8  # tokens that both ways of decoding produce before they are compared


def run_demo(
    cloud: Callable[[], str], speculation: Speculation, network: Network, decoding: Decoding, output: Output
) -> int:
    """`outrider demo`: caption the bundled clips, each in its own language, with a cloud process of its own.

    With --net the cloud alone captions them too: its texts are compared and its time is measured.

    cloud: a function that waits until that process listens and returns its address.
    """
    clips = read_json(BUNDLED / "clips" / "clips.json")
    jobs = [
        Audio(BUNDLED / "clips" / clip["file"], lang=clip["lang"], task=("default", "detailed", "concise")[n % 3])
        for n, clip in enumerate(clips)
    ]
    titles = [f"{clip['file']}  “{clip['text']}”" for clip in clips]
    check(Models(cloud="grpc://127.0.0.1:1"), speculation, network)
    given = [name for name in ("token_file", "tls", "ca", "cert", "key") if getattr(network, name)]
    if given:
        raise SettingsError(f"--{given[0].replace('_', '-')}: the demo's own cloud has no TLS and no tokens")

    def build() -> SpeculativeDecoder:
        draft = load_drafter(Models())  # before it waits for the cloud, which is loading too
        with closed_on_failure(connect(f"grpc://{cloud()}", **network.connection())) as verifier:
            options = build_options(speculation, network)
            return SpeculativeDecoder(draft, verifier, **options.keywords(), watch=output.verbose)

    loading = describe_models(Models(cloud="local:demo"))
    compare = partial(_compare_with_cloud, jobs, decoding) if network.net and not output.json else None
    return _caption_all(jobs, titles, Loading(build, loading), decoding, output, compare)


def _compare_with_cloud(
    jobs: Sequence[Audio], decoding: Decoding, decoder: SpeculativeDecoder, done: list[tuple[str, Result]]
) -> CloudBaseline | None:
    """Decode the same prompts by the cloud alone, over the same connection."""
    if decoder.verifier is None or len(done) != len(jobs):
        return None
    alone = SpeculativeDecoder(None, decoder.verifier, reader=decoder.draft)
    with progress("the cloud alone", len(jobs)) as advance:
        results = []
        for job in jobs:
            results.append(alone.generate(job, **decoding.settings()))
            advance()
    same = sum(one.token_ids == other.token_ids for one, (_, other) in zip(results, done, strict=True))
    return CloudBaseline(len(results), same, sum(one.stats.total_s for one in results))


def run_caption(
    files: Sequence[str],
    lang: str,
    task: str,
    models: Models,
    speculation: Speculation,
    network: Network,
    decoding: Decoding,
    output: Output,
    *,
    instruction: str | None = None,
    split: bool = False,
) -> int:
    """`outrider caption`: every file is tried; those that cannot be used are named, and the exit code is then 1."""
    if not files:
        raise PromptError("no recording was given: outrider caption AUDIO…")
    if instruction is not None:
        if not instruction.strip():
            raise PromptError("--instruction is empty: give a question about the recording, or leave it out")
        if task != "default":
            raise SettingsError(f"--instruction and --task {task} both say what to write: give one of them")
        check_text(instruction)
    check(models, speculation, network)
    jobs = [Audio(Path(name), task=task, lang=lang, instruction=instruction) for name in files]
    loading = Loading(
        partial(build_decoder, models, speculation, network, watch=output.verbose), describe_models(models)
    )
    return _caption_all(jobs, list(files), loading, decoding, output, split=split)


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
    model_input = _prompt(prompt, prompt_ids, chat)
    GenerationSettings.build(decoding.settings())
    if prompt_ids is None:
        check_accepts_text(models)
    loading = Loading(
        partial(build_decoder, models, speculation, network, watch=output.verbose), describe_models(models)
    )
    with _loaded(loading, output) as decoder:
        if prompt_ids is None:  # of a hub id only the loaded model shows it
            decoder.check_accepts_text()
        if not _is_interactive(output):
            _report(decoder.generate(model_input, **decoding.settings()), output, decoder)
        else:
            result = _stream_to_terminal(decoder, model_input, decoding)
            rendering.show_warnings(STDERR, result)
            _print_summary([("", result)])
    return 0


def _stream_to_terminal(decoder: SpeculativeDecoder, model_input: Any, decoding: Decoding) -> Result:
    """Generate on a terminal: tokens appear when they are drafted and take their colour when they are decided."""
    strip = rendering.Strip()
    stream = decoder.stream(model_input, **decoding.settings())
    with Live(console=stdout(), vertical_overflow="visible", refresh_per_second=10) as live:
        shown: Any = ""
        while True:
            try:
                strip.update(next(stream))
            except StopIteration as end:
                result: Result = end.value
                live.update(rendering.coloured(pieces(decoder, result), result.sources))
                return result
            text = strip.text
            live.update(text, refresh=not shown)  # the first one at once, others ten times a second
            shown = text


def _is_interactive(output: Output) -> bool:
    """Whether someone looks at stdout, who can be shown tokens as they come."""
    return not output.json and stdout().is_terminal


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
        raise PromptError(f'--prompt-ids {text!r}: expected whole numbers, as in "1 2 3"') from None
    if not ids:
        raise PromptError("--prompt-ids names no token")
    return ids


# Captions ---------------------------------------------------------------------------------------------------


Comparison = Callable[[SpeculativeDecoder, list[tuple[str, Result]]], CloudBaseline | None]


def _caption_all(
    jobs: Sequence[Audio],
    titles: Sequence[str],
    loading: Loading,
    decoding: Decoding,
    output: Output,
    compare: Comparison | None = None,
    *,
    split: bool = False,
) -> int:
    """Caption every recording. compare: compares the results with those of the cloud alone."""
    settings = GenerationSettings.build(decoding.settings())
    failures = {n: error for n, job in enumerate(jobs) if (error := _recording_error(job)) is not None}
    with ExitStack() as closing:
        decoder = alone = None
        if len(failures) < len(jobs):
            decoder = closing.enter_context(_loaded(loading, output))
            decoder.check_audio_support()
            if compare is not None:
                _warm_up(decoder, jobs[0], decoding, settings)
        done = _caption_each(jobs, titles, failures, decoder, decoding, output, split=split)
        if compare is not None and decoder is not None:
            alone = compare(decoder, done)
    if done and not output.json:
        _print_summary(done, alone)
    return 1 if failures else 0


def _warm_up(decoder: SpeculativeDecoder, job: Audio, decoding: Decoding, settings: GenerationSettings) -> None:
    """Decode a few tokens both ways: the first ones of a process take longer."""
    short_settings = decoding.settings() | {
        "max_new_tokens": min(WARM_UP, settings.max_new_tokens),
        "min_new_tokens": min(WARM_UP, settings.min_new_tokens),
    }
    for one in (decoder, SpeculativeDecoder(None, decoder.verifier, reader=decoder.draft)):
        one.generate(job, **short_settings)


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
    alone = len(jobs) < 2 or _is_interactive(output)  # beside tokens that appear a bar would flicker
    with progress("captions", 0 if alone else len(jobs)) as advance:
        for n, (job, title) in enumerate(zip(jobs, titles, strict=True)):
            if n not in failures and decoder is not None:
                try:
                    for piece in audio.split(job, decoder.audio_seconds) if split else (None,):
                        describe_models = one_line(title) if len(jobs) > 1 or piece is not None else ""
                        result = _caption(job, describe_models, decoder, decoding, output, piece)
                        done.append((one_line(Path(str(job.source)).name) + _times(piece), result))
                except OutriderError as error:
                    failures[n] = error
            if n in failures:
                _print_failure(job, failures[n], output)
            advance()
    return done


def _recording_error(job: Audio) -> OutriderError | None:
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
    """Caption a recording, or a piece of it, and print its text: on a terminal each token as it arrives."""
    prompt, title = job if piece is None else piece.audio, title + _times(piece)
    if _is_interactive(output):
        rendering.show_title(stdout(), title)
        result = _stream_to_terminal(decoder, prompt, decoding)
        stdout().print()
    else:
        result = decoder.generate(prompt, **decoding.settings())
        if output.json:
            where = {} if piece is None else {"start_s": round(piece.start, 3), "end_s": round(piece.end, 3)}
            print_json({"file": str(job.source), **where, "lang": job.lang, "task": job.task, **result.to_json()})
            return result
        _print_text(title, decoder, result)
    rendering.show_warnings(STDERR, result, one_line(str(job.source)) + _times(piece))
    return result


def _print_failure(job: Audio, error: OutriderError, output: Output) -> None:
    print_message(f"outrider: {error}")
    if output.json:
        print_json({"file": str(job.source), "error": {"type": type(error).__name__, "message": str(error)}})


# Output -----------------------------------------------------------------------------------------------------


def _report(result: Result, output: Output, decoder: SpeculativeDecoder) -> None:
    if output.json:
        print_json(result.to_json())
        return
    _print_text("", decoder, result)
    rendering.show_warnings(STDERR, result)
    _print_summary([("", result)])


def _print_text(title: str, decoder: SpeculativeDecoder, result: Result) -> None:
    """Print a text to a pipe or a file: nothing but the text, under its title if there are several."""
    lines = [title] if title else []
    text = "".join(pieces(decoder, result)) if result.text is None else result.text
    print("\n".join([*lines, escape_controls(text), *[""] * bool(title)]), flush=True)  # noqa: T201


def _print_summary(done: list[tuple[str, Result]], alone: CloudBaseline | None = None) -> None:
    """Print the tokens' sources and the gain: below the text on a terminal, else to stderr."""
    console = stdout() if stdout().is_terminal else STDERR
    if console.is_terminal:
        console.print(rendering.legend(source for _, result in done for source in result.sources))
    console.print(rendering.table(done, console.width))
    if gain_text := Gain.of(result for _, result in done).describe(alone):
        console.print(gain_text, style="bold", soft_wrap=True)


def pieces(decoder: SpeculativeDecoder, result: Result) -> list[str]:
    """The text of each token of a result; without a tokenizer, its id."""
    if decoder.tokenizer is None:
        return [f"{token} " for token in result.token_ids]
    transcript = IncrementalDetokenizer(decoder.decode)
    for token in result.token_ids:
        transcript.append(token)
    return transcript.pieces


# Set-up -----------------------------------------------------------------------------------------------------


@contextmanager
def _loaded(loading: Loading, output: Output) -> Iterator[SpeculativeDecoder]:
    """Yield the decoder, and close the session with a cloud across a network at the end."""
    configure_logging(output)
    message = f"loading {loading.description}" if loading.description else "connecting"
    with STDERR.status(Text(message)) if STDERR.is_terminal else nullcontext():
        decoder = loading.build()
    interrupts.check()
    enable_gc()
    print_message(decoder.summary(), "dim")
    try:
        yield decoder
    finally:
        disconnect(decoder.verifier)


def configure_logging(output: Output) -> None:
    """Log to stderr: warnings; with --verbose also details, and the model library's messages and progress bars."""
    from transformers.utils import logging as transformers_logging

    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler()], format="%(message)s")
    logging.captureWarnings(True)  # so that control sequences in a library's warning are escaped as well
    logging.getLogger("outrider").setLevel(logging.DEBUG if output.verbose else logging.NOTSET)
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
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
