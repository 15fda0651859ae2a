"""`outrider eval`: its options, and from them to a run, its table and its exit code."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from outrider.cli.options import Decoding, MaybeWhole, Models, Network, Output, Speculation, Whole
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.evals.context import EvalContext
    from outrider.evals.manifest import Item
    from outrider.evals.metrics import Scoring
    from outrider.evals.store import Row, Store

EVALUATION = Group("Evaluation", sort_key=0)
ASSISTANT = Group("transformers' assistant", sort_key=6)


@Parameter(name="*", group=EVALUATION)
@dataclass(frozen=True)
class Evaluation:
    """What is run, and where it is kept.

    Parameters
    ----------
    out
        The run's folder. The same command goes on where it was; a folder of another run is refused.
    modes
        Comma-separated: edge-only, cloud-only, exact, gated, plain, assisted. All that these options allow otherwise.
    limit
        Only the first so many items.
    trace
        Also write traces.jsonl: what the drafter would have done along the target's output.
    retry_failed
        Try again what failed.
    bertscore
        A folder with an encoder: texts are compared with their references by BERTScore as well.
    edge_threads
        Hold the drafter's threads to this many cores.
    edge_memory
        Hold this process to an address space of this size, as in 4GiB; only without a cloud model in it.
    """

    out: str
    modes: str = ""
    limit: MaybeWhole = None
    trace: Annotated[bool, Parameter(negative="")] = False
    retry_failed: Annotated[bool, Parameter(negative="")] = False
    bertscore: str | None = None
    edge_threads: MaybeWhole = None
    edge_memory: str | None = None

    @property
    def requested(self) -> list[str]:
        """The modes by name; none for all."""
        return [name.strip() for name in self.modes.split(",") if name.strip()]


@Parameter(name="*", group=ASSISTANT)
@dataclass(frozen=True)
class Assistant:
    """How transformers drafts in the mode "assisted".

    Parameters
    ----------
    assistant_tokens
        Tokens per round; transformers' default.
    assistant_schedule
        How that number changes.
    assistant_confidence
        Stop drafting at a token less likely than this; 0 is off.
    """

    assistant_tokens: Whole = 20
    assistant_schedule: Literal["constant", "heuristic", "heuristic_transient"] = "constant"
    assistant_confidence: float = 0.4


@dataclass(frozen=True)
class _Options:
    """All of them, checked."""

    evaluation: Evaluation
    assistant: Assistant
    models: Models
    speculation: Speculation
    network: Network
    decoding: Decoding
    modes: list[str]
    left_out: dict[str, str]
    memory: int | None


def run_eval(
    data: str,
    evaluation: Evaluation,
    assistant: Assistant,
    models: Models,
    speculation: Speculation,
    network: Network,
    decoding: Decoding,
    output: Output,
) -> int:
    """`outrider eval`: 1 if anything failed."""
    from outrider.cli.commands import configure_logging
    from outrider.cli.options import check_accepts_text, enable_gc
    from outrider.evals.manifest import load_set
    from outrider.evals.store import Store

    options = _check_options(evaluation, assistant, models, speculation, network, decoding)
    items = load_set(data)[: evaluation.limit]
    if any(item.audio is None for item in items):
        check_accepts_text(models)
    scoring = _scoring(evaluation)
    configure_logging(output)
    with ExitStack() as stack:
        limits = _limit_memory(options, stack)
        context = _loaded(options, stack, limits)
        enable_gc()
        modes, left_out = context.modes(options.modes, evaluation.requested)
        left_out = options.left_out | left_out
        store = stack.enter_context(
            Store(Path(evaluation.out), _about(context, data, items, modes, left_out, options, limits))
        )
        _run(context, items, modes, store, options)
        names = [mode.name for mode in modes]
        unscored = _summarise(items, names, store, scoring)
        excluded = {} if evaluation.requested else left_out  # who chose the modes knows which were not chosen
        return _report(store, names, excluded | unscored, output)


# Checking ---------------------------------------------------------------------------------------------------


def _check_options(
    evaluation: Evaluation,
    assistant: Assistant,
    models: Models,
    speculation: Speculation,
    network: Network,
    decoding: Decoding,
) -> _Options:
    """Every option, before a model is loaded."""
    from outrider.cli.options import check
    from outrider.config import GenerationSettings
    from outrider.engines.load import resolve_path
    from outrider.evals.modes import select_modes, unsupported_reason
    from outrider.verifiers.connect import parse_cloud_address

    _check_out(evaluation.out)
    options = check(models, speculation, network)
    GenerationSettings.build(decoding.settings())
    _assistance(assistant)
    if models.edge != "none":
        resolve_path(models.edge)
    edge, cloud = models.edge != "none", parse_cloud_address(models.cloud).kind
    sides: dict[str, Any] = {"edge": edge, "cloud": cloud, "limited": evaluation.edge_threads is not None}
    modes, left_out = select_modes(evaluation.requested, lambda name: unsupported_reason(name, options, **sides))
    if evaluation.limit is not None and evaluation.limit < 1:
        raise SettingsError(f"--limit is 1 or more, not {evaluation.limit}")
    if evaluation.trace and not (edge and cloud != "none"):
        raise SettingsError("--trace needs an edge and a cloud: a trace is the drafter's view of the target's output")
    if not edge and cloud != "local":
        raise SettingsError("an evaluation needs a model in this process that reads its prompts: give --edge")
    memory = _check_limits(evaluation, models, cloud)
    return _Options(evaluation, assistant, models, speculation, network, decoding, modes, left_out, memory)


def _check_out(out: str) -> None:
    if not out.strip():
        raise SettingsError("--out is empty: give a directory for the run")
    if Path(out).exists() and not Path(out).is_dir():
        raise SettingsError(f"--out {out} is a file: give a directory for the run")


def _check_limits(evaluation: Evaluation, models: Models, cloud: str) -> int | None:
    """Bytes of --edge-memory, or None."""
    from outrider.evals.resource_limits import check_memory, check_threads
    from outrider.serving.sizes import parse_bytes

    for name in ("edge_threads", "edge_memory"):
        if getattr(evaluation, name) is not None and models.edge == "none":
            raise SettingsError(f"--{name.replace('_', '-')}: there is no edge model")
    if evaluation.edge_threads is not None:
        check_threads(evaluation.edge_threads)
    if evaluation.edge_memory is None:
        return None
    check_memory(cloud=cloud, device=models.device)
    return parse_bytes(evaluation.edge_memory)


def _assistance(assistant: Assistant) -> Any:
    from outrider.evals.baselines import Assistance

    return Assistance(assistant.assistant_tokens, assistant.assistant_schedule, assistant.assistant_confidence)


# Loading ----------------------------------------------------------------------------------------------------


def _limit_memory(options: _Options, stack: ExitStack) -> dict[str, Any]:
    """The limits that hold, as they were read back."""
    from outrider.evals.resource_limits import address_space

    memory_limit = None if options.memory is None else stack.enter_context(address_space(options.memory))
    return {"edge_threads": None, "edge_memory_bytes": memory_limit}


def _loaded(options: _Options, stack: ExitStack, limits: dict[str, Any]) -> EvalContext:
    """The models; limits gains what holds the drafter's threads."""
    from outrider.cli.options import build_options
    from outrider.evals.context import EvalContext
    from outrider.evals.modes import Setup

    try:
        draft, verifier = _models(options, stack)
    except MemoryError as error:
        raise SettingsError(f"--edge-memory {options.evaluation.edge_memory}: the models do not fit") from error
    if options.evaluation.edge_threads is not None:
        limits["edge_threads"] = draft.affinity
    setup = Setup(options.decoding.settings(), build_options(options.speculation, options.network))
    return EvalContext(draft, verifier, setup, _assistance(options.assistant))


def _models(options: _Options, stack: ExitStack) -> tuple[Any, Any]:
    """The edge's engine and the verifier; a cloud that cannot be reached is known before a model is loaded."""
    from outrider.cli.options import connect_verifier, load_drafter
    from outrider.evals.resource_limits import PinnedEngine
    from outrider.verifiers.base import Connectable, disconnect

    models, threads = options.models, options.evaluation.edge_threads
    verifier = connect_verifier(models, options.network)
    stack.callback(disconnect, verifier)
    if isinstance(verifier, Connectable):
        verifier.probe()
    draft: Any = load_drafter(models) if threads is None else PinnedEngine(lambda: load_drafter(models), threads)
    return draft, verifier


def _about(
    context: EvalContext,
    data: str,
    items: list[Item],
    modes: list[Any],
    left_out: dict[str, str],
    options: _Options,
    limits: dict[str, Any],
) -> Row:
    from outrider.evals.context import describe_run

    secrets = ("token_file", "ca", "cert", "key")
    network = {name: value for name, value in asdict(options.network).items() if name not in secrets}
    more = {"asked": asdict(options.models), "network": network, "limits": limits, "trace": options.evaluation.trace}
    return describe_run(context, data, items, modes, left_out, **more)


# Running ----------------------------------------------------------------------------------------------------


def _run(context: EvalContext, items: list[Item], modes: list[Any], store: Store, options: _Options) -> None:
    from outrider.cli.commands import progress
    from outrider.evals.runner import count_steps, run

    if options.evaluation.retry_failed:
        store.forget_failures()
    tracer = context.tracer() if options.evaluation.trace else None
    with progress("eval", count_steps(items, modes, tracer)) as advance:
        run(items, modes, store, tracer, advance)


# Reporting --------------------------------------------------------------------------------------------------


def _scoring(evaluation: Evaluation) -> Scoring:
    """How texts are scored. An encoder that cannot be used is known before a model is loaded."""
    from outrider.evals.bertscore import Encoder
    from outrider.evals.metrics import Scoring

    return Scoring(encoder=None if evaluation.bertscore is None else Encoder(Path(evaluation.bertscore)))


def _summarise(items: list[Item], modes: list[str], store: Store, scoring: Scoring) -> dict[str, str]:
    """Write summary.json; what could not be computed, and why."""
    from outrider.evals.scoring import quality, times

    results, unscored = store.results.rows, {}
    try:
        found = quality(items, modes, results, scoring)
    except SettingsError as error:  # a package that is not there: the run itself needs none of it
        found, unscored = {}, {"metrics of texts": str(error)}
    store.summarise({"modes": found, "latency": times(items, modes, results, store.timings.rows, scoring)})
    return unscored


def _report(store: Store, modes: list[str], left_out: dict[str, str], output: Output) -> int:
    from outrider.cli.terminal import print_json, print_message, stdout
    from outrider.evals import summary

    found = summary.summarise(modes, store.results.rows, store.timings.rows)
    failed = summary.failures(store.results.rows)
    if output.json:
        whole = {"out": str(store.folder), "modes": found, "left_out": left_out, "failures": failed}
        print_json({**whole, "traces": len(store.traces.rows)})
    else:
        stdout().print(_table(found))
        for name, reason in left_out.items():
            print_message(f"left out: {name}: {reason}", "dim")
    for row in store.results.rows.values():
        if "error" in row:
            _print_error(row)
    return 1 if failed else 0


def _print_error(row: Row) -> None:
    from outrider.cli.escape import one_line
    from outrider.cli.terminal import print_message

    error = f"{row['error']['type']}: {row['error']['message']}"
    line = f"outrider: {row['id']}, {row['mode']}: {error}"
    print_message(one_line(line))


def _table(found: dict[str, dict[str, Any]]) -> Table:
    """same: as cloud-only's tokens. TTFT: the median. up, down: bytes on the network. In 80 columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("mode", no_wrap=True)
    columns = ["items", "failed", "skipped", "same", "tok/s", "TTFT", "cloud", "accept", "up", "down"]
    if not any(one["skipped"] for one in found.values()):
        columns.remove("skipped")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for mode, one in found.items():
        table.add_row(mode, *(_cells(one)[name] for name in columns))
    return table


def _cells(one: dict[str, Any]) -> dict[str, str]:
    speed, first = one["tokens_per_s"], one["ttft_p50_s"]
    return {
        "items": str(one["items"]),
        "failed": str(one["failures"]),
        "skipped": str(one["skipped"]),
        "same": _percent(one["agreement"]),
        "tok/s": "–" if speed is None else f"{speed:.1f}",
        "TTFT": "–" if first is None else f"{1000 * first:.0f}ms",
        "cloud": _percent(one["cloud_share"]),
        "accept": _percent(one["acceptance"]),
        "up": _size(one["bytes_up"]),
        "down": _size(one["bytes_down"]),
    }


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.0f}%"


def _size(count: int) -> str:
    return f"{count / 1000:.1f}k" if count < 999_950 else f"{count / 1_000_000:.1f}M"
