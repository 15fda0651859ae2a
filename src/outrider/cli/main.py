"""`outrider`: the command line. Exit codes: 0 ok, 2 bad usage or input, 1 failure."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from outrider import __version__
from outrider.cli.cloud import Capacity, Operation, Security
from outrider.cli.options import Decoding, Models, Network, Output, Speculation
from outrider.errors import InputError, OutriderError

app = App(
    name="outrider",
    help="Edge–cloud speculative decoding for language and audio-language models.",
    version=__version__,
    help_format="plaintext",
)


@app.command
def demo(
    *,
    speculation: Speculation = Speculation(),
    network: Network = Network(),
    decoding: Decoding = Decoding(),
    output: Output = Output(),
) -> int:
    """Caption the bundled clips, edge and cloud in two processes, and show who decided each token."""
    from outrider.cli.child import starting_cloud

    share = max(1, (os.cpu_count() or 1) // 2)  # of the cores: with all for each, edge and cloud stall
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    with starting_cloud("demo") as address:  # it loads while this process, from the next line on, does
        from outrider.cli.commands import run_demo

        return run_demo(address, speculation, network, decoding, output)


@app.command
def caption(
    *audio: str,
    lang: Literal["zh", "en"] = "en",
    task: Literal["default", "detailed", "concise"] = "default",
    models: Models = Models(),
    speculation: Speculation = Speculation(),
    network: Network = Network(),
    decoding: Decoding = Decoding(),
    output: Output = Output(),
) -> int:
    """Describe how the speech in each recording sounds.

    Parameters
    ----------
    audio
        Recordings, in any format that libsndfile reads.
    lang
        The caption's language.
    task
        How much to say.
    """
    from outrider.cli.commands import run_caption

    return run_caption(audio, lang, task, models, speculation, network, decoding, output)


@app.command
def generate(
    prompt: str | None = None,
    *,
    prompt_ids: str | None = None,
    chat: Annotated[bool, Parameter(negative="")] = False,
    models: Models = Models(),
    speculation: Speculation = Speculation(),
    network: Network = Network(),
    decoding: Decoding = Decoding(),
    output: Output = Output(),
) -> int:
    """Continue a text, or answer it.

    Parameters
    ----------
    prompt
        The text; read from standard input where neither it nor --prompt-ids is given.
    prompt_ids
        Token ids instead, as in "1 2 3".
    chat
        Put the prompt through the model's chat template, as the user's turn.
    """
    from outrider.cli.commands import run_generate

    return run_generate(prompt, prompt_ids, chat, models, speculation, network, decoding, output)


@app.command
def cloud(
    model: str,
    /,
    *,
    listen: str = "127.0.0.1:7070",
    security: Security = Security(),
    capacity: Capacity = Capacity(),
    operation: Operation = Operation(),
) -> int:
    """Serve verification to edges, until SIGTERM.

    Parameters
    ----------
    model
        The verifier: a directory, hub id, .gguf file, or "demo".
    listen
        HOST:PORT; port 0 takes a free one. An address that other machines can reach needs TLS and tokens.
    """
    from outrider.cli.cloud import run_cloud

    return run_cloud(model, listen, security, capacity, operation)


def main() -> None:
    """Parse, run, and turn every error into a line on stderr and an exit code."""
    gc.disable()  # until models are loaded: modules by the thousand hold no garbage, and the search costs a seventh
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the model libraries' bars are for people who watch
    sys.exit(_guarded(partial(_run, sys.argv[1:])))


def _run(tokens: list[str]) -> int:
    result: Any = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    return result if isinstance(result, int) else 0


def _guarded(run: Callable[[], int]) -> int:
    try:
        return run()
    except CycloptsError as error:
        return _complain(str(error), 2)
    except InputError as error:
        return _complain(str(error), 2)
    except OutriderError as error:
        return _complain(str(error), 1)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except Exception as error:  # the process's outermost loop: whatever is left is a bug of ours
        logging.getLogger("outrider").debug("unexpected error", exc_info=True)
        return _complain(f"unexpected {type(error).__name__}: {error} (see --verbose)", 1)


def _complain(message: str, code: int) -> int:
    print(f"outrider: {message}", file=sys.stderr)  # noqa: T201
    return code
