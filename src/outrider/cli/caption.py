"""`outrider demo` and `outrider caption`, once their options are parsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.api import SpeculativeDecoder
from outrider.cli import rendering
from outrider.cli.build import build_decoder, build_options, check, closed_on_failure, load_drafter
from outrider.cli.escape import one_line
from outrider.cli.loading import Loading, describe_models, loaded_decoder
from outrider.cli.options import Models, Output, Run
from outrider.cli.progress import progress_bar
from outrider.cli.terminal import STDERR, print_json, print_message, stdout
from outrider.config import GenerationSettings
from outrider.decoding.gain import CloudBaseline
from outrider.decoding.result import Result
from outrider.engines.load import BUNDLED
from outrider.engines.prefix_cache import unique_salt
from outrider.errors import AudioError, OutriderError, PromptError, SettingsError
from outrider.files import read_json
from outrider.hints import install_command
from outrider.prompts import audio
from outrider.prompts.audio import Audio, Piece
from outrider.prompts.chat import check_text
from outrider.verifiers.connect import connect

WARM_UP = 8  # tokens that both modes produce before they are compared
Comparison = Callable[[SpeculativeDecoder, list[tuple[str, Result]]], CloudBaseline | None]


def run_demo(cloud: Callable[[], str] | None, run: Run) -> int:
    """Run `outrider demo`: caption the bundled clips, each in its own language, with a cloud process of its own.

    With --net the cloud alone captions them as well, for a comparison of texts and times.

    cloud: waits until the cloud process listens, and returns its address. None runs both models in this process.
    run: its models are those of the demo.
    """
    clips = read_json(BUNDLED / "clips" / "clips.json")
    jobs = [
        Audio(BUNDLED / "clips" / clip["file"], lang=clip["lang"], task=("default", "detailed", "concise")[n % 3])
        for n, clip in enumerate(clips)
    ]
    titles = [f"{clip['file']}  “{clip['text']}”" for clip in clips]
    run = replace(run, models=Models(cloud="local:demo" if cloud is None else "grpc://127.0.0.1:1"))
    if cloud is None:
        run = replace(run, network=replace(run.network, driver="sequential"))
        print_message(f"both models run in this process; for a cloud process: {install_command('cloud')}")
    check(run)
    run.network.check_own_cloud("the demo's")

    def build() -> SpeculativeDecoder:
        if cloud is None:
            return build_decoder(run, watch=run.output.verbose)
        draft = load_drafter(Models())  # first, as the cloud process is loading its model at the same time
        with closed_on_failure(connect(f"grpc://{cloud()}", **run.network.connection())) as verifier:
            options = build_options(run.speculation, run.network)
            return SpeculativeDecoder(draft, verifier, **options.keywords(), watch=run.output.verbose)

    loading = Loading(build, describe_models(Models(cloud="local:demo")))
    compare = partial(_compare_with_cloud, jobs, run.decoding.settings())
    return _caption_all(jobs, titles, loading, run, compare if run.network.net and not run.output.json else None)


def run_caption(
    files: Sequence[str], lang: str, task: str, run: Run, *, instruction: str | None = None, split: bool = False
) -> int:
    """Run `outrider caption` on every file, and name those that cannot be used. Return 1 if there are any, 2 if all."""
    if not files:
        raise PromptError("no recording was given: outrider caption AUDIO…")
    if instruction is not None:
        if not instruction.strip():
            raise PromptError("--instruction is empty: give a question about the recording, or leave it out")
        if task != "default":
            raise SettingsError(f"--instruction replaces --task, so --task {task} has no effect: give one of them")
        if lang != "en":
            raise SettingsError(f"--instruction replaces --lang, so --lang {lang} has no effect: give one of them")
        check_text(instruction)
    check(run)
    jobs = [Audio(Path(name), task=task, lang=lang, instruction=instruction) for name in files]
    loading = Loading(partial(build_decoder, run, watch=run.output.verbose), describe_models(run.models))
    return _caption_all(jobs, list(files), loading, run, split=split)


def _compare_with_cloud(
    jobs: Sequence[Audio], settings: dict[str, Any], decoder: SpeculativeDecoder, done: list[tuple[str, Result]]
) -> CloudBaseline | None:
    """Decode the same prompts by the cloud alone, over the same connection."""
    if decoder.verifier is None or len(done) != len(jobs):
        return None
    cloud_only = SpeculativeDecoder(None, decoder.verifier, reader=decoder.draft)
    with progress_bar("the cloud alone", len(jobs)) as advance:
        results = []
        for job in jobs:
            results.append(cloud_only.generate(job, cache_salt=unique_salt(), **settings))
            advance()
    same = sum(one.token_ids == other.token_ids for one, (_, other) in zip(results, done, strict=True))
    return CloudBaseline(len(results), same, sum(one.stats.total_s for one in results))


def _caption_all(
    jobs: Sequence[Audio],
    titles: Sequence[str],
    loading: Loading,
    run: Run,
    compare: Comparison | None = None,
    *,
    split: bool = False,
) -> int:
    """Caption every recording. compare: decodes them by the cloud alone, for the summary."""
    output, settings = run.output, GenerationSettings.build(run.decoding.settings())
    failures = {n: error for n, job in enumerate(jobs) if (error := _recording_error(job)) is not None}
    is_unusable = len(failures) == len(jobs)
    with ExitStack() as closing:
        decoder = baseline = None
        if not is_unusable:
            decoder = closing.enter_context(loaded_decoder(loading, output))
            decoder.check_audio_support()
            if compare is not None:
                _warm_up(decoder, jobs[0], settings)
        done = _caption_each(jobs, titles, failures, decoder, run, split=split)
        if compare is not None and decoder is not None:
            baseline = compare(decoder, done)
    if done and not output.json:
        rendering.print_summary(done, baseline)
    return 2 if is_unusable else int(bool(failures))


def _warm_up(decoder: SpeculativeDecoder, job: Audio, settings: GenerationSettings) -> None:
    """Decode a few tokens in both modes, as the first ones of a process take longer."""
    limits = {name: min(WARM_UP, getattr(settings, name)) for name in ("max_new_tokens", "min_new_tokens")}
    for one in (decoder, SpeculativeDecoder(None, decoder.verifier, reader=decoder.draft)):
        one.generate(job, cache_salt=unique_salt(), **asdict(settings) | limits)


def _caption_each(
    jobs: Sequence[Audio],
    titles: Sequence[str],
    failures: dict[int, OutriderError],
    decoder: SpeculativeDecoder | None,
    run: Run,
    *,
    split: bool,
) -> list[tuple[str, Result]]:
    """Caption and print the usable recordings, and add an entry to `failures` for each of the others."""
    output, done = run.output, list[tuple[str, Result]]()
    without_bar = len(jobs) < 2 or rendering.is_interactive(output)  # a bar would flicker next to streamed tokens
    with progress_bar("captions", 0 if without_bar else len(jobs)) as advance:
        for n, (job, title) in enumerate(zip(jobs, titles, strict=True)):
            if n not in failures and decoder is not None:
                try:
                    for piece in audio.split(job, decoder.audio_seconds) if split else (None,):
                        shown_title = one_line(title) if len(jobs) > 1 or piece is not None else ""
                        result = _caption(job, shown_title, decoder, run, piece)
                        done.append((one_line(Path(str(job.source)).name) + _times(piece), result))
                except OutriderError as error:
                    failures[n] = error
            if n in failures:
                _print_failure(job, failures[n], output)
            advance()
    return done


def _recording_error(job: Audio) -> OutriderError | None:
    """Return the error of an unusable recording, before any model is loaded."""
    try:
        audio.read(job)
    except AudioError as error:
        return error
    return None


def _times(piece: Piece | None) -> str:
    """Return the start and end of a piece, as in " 0:30–1:00"."""
    if piece is None:
        return ""
    start, end = (f"{int(seconds) // 60}:{seconds % 60:04.1f}" for seconds in (piece.start, piece.end))
    return f" {start}–{end}"


def _caption(job: Audio, title: str, decoder: SpeculativeDecoder, run: Run, piece: Piece | None) -> Result:
    """Caption a recording, or a piece of it, and print its text. On a terminal, print each token as it arrives."""
    prompt, settings, output = job if piece is None else piece.audio, run.decoding.settings(), run.output
    title += _times(piece)
    if rendering.is_interactive(output):
        rendering.show_title(stdout(), title)
        result = rendering.stream_to_terminal(decoder, prompt, settings)
        stdout().print()
    else:
        result = decoder.generate(prompt, **settings)
        if output.json:
            where = {} if piece is None else {"start_s": round(piece.start, 3), "end_s": round(piece.end, 3)}
            print_json({"file": str(job.source), **where, "lang": job.lang, "task": job.task, **result.to_json()})
            return result
        rendering.print_text(title, result)
    rendering.show_warnings(STDERR, result, one_line(str(job.source)) + _times(piece))
    return result


def _print_failure(job: Audio, error: OutriderError, output: Output) -> None:
    print_message(f"outrider: {error}")
    if output.json:
        print_json({"file": str(job.source), "error": {"type": type(error).__name__, "message": str(error)}})
