"""The commands of `outrider`: their options and help texts. Importing this loads no model library."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Literal

from cyclopts import App, Parameter

from outrider import __version__
from outrider.cli.cloud import Capacity, Operation, Security
from outrider.cli.edge import Serving
from outrider.cli.evaluate import Assistant, Evaluation
from outrider.cli.options import (
    Decoding,
    DemoNetwork,
    Measurement,
    Models,
    Output,
    Pair,
    Run,
    Speculation,
    TargetTokenizer,
    Whole,
)
from outrider.cli.plan import Drivers, Measured
from outrider.cli.shell import add_completion, format_default
from outrider.config import DEFAULT_K

app = App(
    name="outrider",
    help="Edge–cloud speculative decoding for language and audio-language models.",
    version=__version__,
    help_format="markdown",
    help_epilogue="Results go to stdout, everything else to stderr. `outrider COMMAND --help` shows examples.",
    default_parameter=Parameter(show_default=format_default),
    suppress_keyboard_interrupt=False,
)
add_completion(app)


@app.command
def demo(
    *,
    speculation: Speculation = Speculation(),
    network: DemoNetwork = DemoNetwork(),
    decoding: Decoding = Decoding(),
    output: Output = Output(),
) -> int:
    """Caption the bundled clips with edge and cloud in two processes, and show which side decided each token.

    With --net the cloud alone captions them as well, for a comparison of texts and times.

    ```text
    outrider demo
    outrider demo --net rtt=80ms
    ```
    """
    from outrider.cli.subprocess_cloud import demo_cloud
    from outrider.hints import check_extra, has_extra

    if network.net:
        check_extra("outrider demo --net", "cloud")
    with demo_cloud() if has_extra("cloud") else nullcontext() as address:
        from outrider.cli.caption import run_demo

        return run_demo(address, Run(Models(), speculation, network, decoding, output))


@app.command
def caption(
    *audio: str,
    lang: Literal["zh", "en"] = "en",
    task: Literal["default", "detailed", "concise"] = "default",
    instruction: str | None = None,
    split: Annotated[bool, Parameter(negative="")] = False,
    run: Run = Run(),
) -> int:
    """Describe the sound of the speech in each recording.

    ```text
    outrider caption speech.wav --lang zh --task detailed
    outrider caption *.wav --cloud grpc://127.0.0.1:7070 --json
    outrider caption speech.wav --instruction "How fast is this person speaking?"
    ```

    Parameters
    ----------
    audio
        Recordings: wav, flac, ogg, opus, mp3, aiff and others; m4a, mp4, webm, aac, amr and wma with the extra media.
    lang
        The caption's language.
    task
        The length of the caption.
    instruction
        A question about the recording, instead of --task.
    split
        Divide recordings that exceed the models' window into pieces of equal length, each captioned with its times.
    """
    from outrider.cli.caption import run_caption

    return run_caption(audio, lang, task, run, instruction=instruction, split=split)


@app.command
def generate(
    prompt: str | None = None,
    *,
    prompt_ids: str | None = None,
    chat: Annotated[bool, Parameter(negative="")] = False,
    run: Run = Run(),
    target_tokenizer: TargetTokenizer = None,
) -> int:
    """Continue a text, or answer it with --chat.

    ```text
    outrider generate "def fibonacci(n):" --edge SMALL --cloud local:LARGE
    outrider generate --chat --edge SMALL --cloud grpc://127.0.0.1:7070 < prompt.txt > answer.txt
    ```

    Parameters
    ----------
    prompt
        The text. Without it and --prompt-ids, standard input is read.
    prompt_ids
        Token ids instead of a text, as in "1 2 3".
    chat
        Apply the model's chat template, with the prompt as the user's message.
    """
    from outrider.cli.generate import run_generate

    return run_generate(prompt, prompt_ids, chat, run, target_tokenizer=target_tokenizer)


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
    """Serve verification to edges until SIGTERM.

    ```text
    outrider cloud demo
    outrider cloud MODEL --listen 0.0.0.0:7070 --tls-cert cloud.pem --tls-key cloud.key --tokens tokens.txt
    ```

    Parameters
    ----------
    model
        The verifier: a directory, hub id, .gguf file, or "demo".
    listen
        HOST:PORT. Port 0 takes a free one. An address that other machines can reach needs TLS and tokens.
    """
    from outrider.cli.cloud import run_cloud

    return run_cloud(model, listen, security, capacity, operation)


@app.command
def edge(
    *,
    listen: str = "127.0.0.1:8080",
    pair: Pair = Pair(),
    target_tokenizer: TargetTokenizer = None,
    serving: Serving = Serving(),
) -> int:
    """Serve the pair to OpenAI clients and browsers until SIGTERM.

    The options for speculation, network and decoding are the defaults of requests. A local:MODEL cloud runs in a
    process of its own.

    ```text
    outrider edge
    outrider edge --edge SMALL --cloud grpc://127.0.0.1:7070 --listen 127.0.0.1:8080
    ```

    Parameters
    ----------
    listen
        HOST:PORT. Port 0 takes a free one. An address that other machines can reach needs API keys.
    """
    from outrider.cli.edge import run_edge

    return run_edge(listen, pair, serving, target_tokenizer=target_tokenizer)


@app.command(name="eval")
def evaluate(
    data: str,
    /,
    *,
    evaluation: Evaluation,
    assistant: Assistant = Assistant(),
    run: Run = Run(),
    target_tokenizer: TargetTokenizer = None,
) -> int:
    """Decode a data set in several modes with the same models. The same command resumes an interrupted run.

    ```text
    outrider eval demo --out run --gate entropy:0.3 --trace
    outrider eval manifest.jsonl --out run --modes exact,cloud-only
    ```

    Parameters
    ----------
    data
        A data set: "demo" (the bundled clips), a manifest (JSON list or lines), or a file in Spec-Bench's format.
    """
    from outrider.cli.evaluate import run_eval

    return run_eval(data, evaluation, assistant, run, target_tokenizer=target_tokenizer)


@app.command
def calibrate(
    traces: str,
    /,
    *,
    out: str,
    epsilon: float = 0.02,
    loss: Literal["outputs", "tokens"] = "outputs",
    k: Whole = DEFAULT_K,
    audit: float = 0.05,
    seed: Whole = 0,
    pair: Measurement = Measurement(),
) -> int:
    """Find the gate that escalates least within a risk budget, from traces.

    Use it with --gate calibrated:FILE.

    ```text
    outrider calibrate run/traces.jsonl --out gate.json --epsilon 0.2
    outrider caption speech.wav --gate calibrated:gate.json
    ```

    Parameters
    ----------
    traces
        Traces of this pair with these decoding options, as `outrider eval --trace` writes them (DIR/traces.jsonl).
    out
        The gate file.
    epsilon
        The risk budget: the largest expected loss, as a share.
    loss
        The loss: the share of outputs that differ from the cloud's (outputs), or of its tokens from the first
        difference on (tokens).
    k
        The block length of the gate.
    audit
        The share of skipped blocks that are verified at random, to monitor the risk.
    seed
        The seed that the traces were decoded with. It also divides them between choosing the signal and setting its
        threshold.
    """
    from outrider.cli.calibrate import load_descriptions, run_calibrate
    from outrider.config import GenerationSettings
    from outrider.files import check_writable

    check_writable(out)
    settings = GenerationSettings.build(pair.decoding.settings() | {"seed": seed})
    edge, cloud = load_descriptions(pair.models, pair.connection)
    return run_calibrate(
        traces, out, epsilon, k, edge, cloud, settings, loss=loss, audit=audit, seed=seed, json_output=pair.output.json
    )


@app.command
def plan(
    *,
    net: str = "rtt=0ms",
    aim: Literal["latency", "cloud", "quality", "privacy"] = "latency",
    budget: float | None = None,
    gate: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    utilisation: float = 0.0,
    measured: Measured = Measured(),
    pair: Measurement = Measurement(),
) -> int:
    """Rank the decoding modes for this pair, network and goal. Often the cloud alone is the best.

    ```text
    outrider plan --net rtt=50ms,bw=2Mbit
    outrider plan --aim quality --budget 0.01 --traces run/traces.jsonl
    ```

    Parameters
    ----------
    net
        The network between edge and cloud, as in rtt=50ms,bw=2Mbit.
    aim
        The quantity to minimise: seconds (latency), the cloud's seconds (cloud), tokens that the cloud decides
        (quality), or bytes that leave the edge (privacy).
    budget
        The share of tokens that may differ from the cloud's. The default is 0, or no limit for --aim privacy.
    gate
        A gate to try, as in entropy:1.5 (may be given several times). By default the gates with the smallest cloud
        share.
    utilisation
        The cloud's load from other clients, 0 to below 1.
    """
    from outrider.cli.plan import run_plan

    return run_plan(measured, pair, net, aim, budget, gate, utilisation)


@app.command
def sweep(
    *,
    gate: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    k: Annotated[tuple[str, ...], Parameter(negative="")] = (str(DEFAULT_K),),
    driver: Annotated[tuple[Drivers, ...], Parameter(negative="")] = ("sequential",),
    net: Annotated[tuple[str, ...], Parameter(negative="")] = ("rtt=50ms",),
    out: str | None = None,
    measured: Measured = Measured(),
    pair: Measurement = Measurement(),
) -> int:
    """Simulate combinations of gates, block lengths, drivers and networks over this pair's traces.

    ```text
    outrider sweep --traces run/traces.jsonl --net rtt=10ms --net rtt=100ms --out run/sweep.jsonl
    ```

    Parameters
    ----------
    gate
        Gates. By default entropy thresholds that cover all cloud shares (each option may be given several times).
    k
        Block lengths, 1 to 64, or auto.
    driver
        The drivers.
    net
        Networks, as in rtt=50ms,bw=2Mbit.
    out
        Also write the rows to this file, one JSON object per line. `outrider report` plots them.
    """
    from outrider.cli.plan import run_sweep

    return run_sweep(measured, pair, gate, k, driver, net, out)


@app.command
def report(*dirs: str, out: str = "report.html") -> int:
    """Write one HTML page about evaluations. It opens without a network.

    Parameters
    ----------
    dirs
        Directories that `outrider eval` wrote.
    out
        The HTML file.
    """
    from outrider.cli.report import run_report

    return run_report(dirs, out)
