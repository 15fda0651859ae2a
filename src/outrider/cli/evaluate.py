"""`outrider eval`: its options, their checks, the run and its summary."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from outrider.cli.options import MaybeWhole, Models, Output, Run, Whole, check_limit
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.engines.base import Engine
    from outrider.evals.baselines import Assistance
    from outrider.evals.context import EvalContext
    from outrider.evals.manifest import Item
    from outrider.evals.metrics import Scoring
    from outrider.evals.modes import Mode
    from outrider.evals.store import Row, Store

    Limits = dict[str, dict[str, int] | int | None]

EVALUATION = Group("Evaluation", sort_key=0)
ASSISTANT = Group("transformers' assistant", sort_key=6)


@Parameter(name="*", group=EVALUATION)
@dataclass(frozen=True)
class Evaluation:
    """The modes and items of a run, and its directory.

    Parameters
    ----------
    out
        The run's directory. The same command resumes the run in it. A directory of another run is refused.
    modes
        Comma-separated: edge-only, cloud-only, exact, gated, plain, assisted. By default all that the options allow.
    limit
        Use only this many items, from the first one on.
    trace
        Also write traces.jsonl: the drafter's predictions along the target's output.
    retry_failed
        Repeat failed items.
    bertscore
        A directory with an encoder, to compare texts with their references by BERTScore as well.
    edge_threads
        Limit the drafter's threads to this many cores.
    edge_memory
        Limit the address space of this process, as in 4GiB. Only without a cloud model in it.
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
        """The names of the requested modes, or an empty list for all modes."""
        return [name.strip() for name in self.modes.split(",") if name.strip()]


@Parameter(name="*", group=ASSISTANT)
@dataclass(frozen=True)
class Assistant:
    """The settings of transformers' assisted generation, for the mode "assisted".

    Parameters
    ----------
    assistant_tokens
        Drafted tokens per round.
    assistant_schedule
        The schedule of that number.
    assistant_confidence
        Stop drafting at a token that is less likely than this; 0 is off.
    """

    assistant_tokens: Whole = 20
    assistant_schedule: Literal["constant", "heuristic", "heuristic_transient"] = "constant"
    assistant_confidence: float = 0.4


@dataclass(frozen=True)
class _Options:
    """The checked options."""

    evaluation: Evaluation
    assistant: Assistance
    run: Run
    modes: list[str]
    left_out: dict[str, str]
    memory: int | None
    target_tokenizer: str | None


def run_eval(
    data: str, evaluation: Evaluation, assistant: Assistant, run: Run, *, target_tokenizer: str | None = None
) -> int:
    """Run `outrider eval`. Return 1 if an item failed."""
    from outrider.cli.build import check_accepts_text, enable_gc
    from outrider.cli.terminal import configure_logging
    from outrider.evals.bertscore import Encoder
    from outrider.evals.manifest import load_set
    from outrider.evals.metrics import Scoring
    from outrider.evals.store import Store

    options = _check_options(evaluation, assistant, run, target_tokenizer)
    items = load_set(data)[: evaluation.limit]
    if any(item.audio is None for item in items):
        check_accepts_text(run.models)
    # An unusable encoder raises before a model is loaded.
    scoring = Scoring(encoder=None if evaluation.bertscore is None else Encoder(Path(evaluation.bertscore)))
    configure_logging(run.output)
    with ExitStack() as stack:
        context, limits = _loaded(options, stack)
        enable_gc()
        modes, left_out = context.modes(options.modes, evaluation.requested)
        left_out = options.left_out | left_out
        store = stack.enter_context(
            Store(Path(evaluation.out), _about(context, data, items, modes, left_out, options, limits))
        )
        _run(context, items, modes, store, evaluation)
        names = [mode.name for mode in modes]
        unscored = _summarise(items, names, store, scoring)
        excluded = {} if evaluation.requested else left_out  # with --modes, nothing is left out unexpectedly
        return _report(store, names, excluded | unscored, run.output)


# Checking ---------------------------------------------------------------------------------------------------


def _check_options(evaluation: Evaluation, assistant: Assistant, run: Run, target_tokenizer: str | None) -> _Options:
    """Check every option before a model is loaded."""
    from outrider.cli.build import check, check_edge, check_target_tokenizer
    from outrider.config import GenerationSettings
    from outrider.evals.baselines import Assistance
    from outrider.evals.modes import select_modes, unsupported_reason
    from outrider.verifiers.connect import parse_cloud_address

    if not evaluation.out.strip():
        raise SettingsError("--out is empty: give a directory for the run")
    if Path(evaluation.out).exists() and not Path(evaluation.out).is_dir():
        raise SettingsError(f"--out {evaluation.out} is a file: give a directory for the run")
    models = run.models
    options = check(run)
    GenerationSettings.build(run.decoding.settings())
    assistance = Assistance(assistant.assistant_tokens, assistant.assistant_schedule, assistant.assistant_confidence)
    check_edge(models)
    if target_tokenizer is not None:
        check_target_tokenizer(models, target_tokenizer)
    edge, cloud = models.edge_model is not None, parse_cloud_address(models.cloud).kind
    limited = evaluation.edge_threads is not None
    modes, left_out = select_modes(
        evaluation.requested,
        lambda name: unsupported_reason(
            name, options, edge=edge, cloud=cloud, limited=limited, lookup=models.uses_lookup
        ),
    )
    check_limit(evaluation.limit)
    if evaluation.trace and not (edge and cloud != "none"):
        raise SettingsError(
            "--trace needs an edge model and a cloud: a trace is the drafter's view of the target's output"
        )
    if not edge and models.lookup_tokenizer is None and cloud != "local":
        raise SettingsError(
            "an evaluation needs a model in this process, for the tokenizer of its prompts: give --edge MODEL, or "
            "--edge lookup:TOKENIZER"
        )
    memory = _check_limits(evaluation, models, cloud)
    return _Options(evaluation, assistance, run, modes, left_out, memory, target_tokenizer)


def _check_limits(evaluation: Evaluation, models: Models, cloud: str) -> int | None:
    """Check the limits of the edge, and return the bytes of --edge-memory, or None."""
    from outrider.evals.resource_limits import check_memory, check_threads
    from outrider.serving.sizes import parse_bytes

    for name in ("edge_threads", "edge_memory"):
        if getattr(evaluation, name) is not None and models.edge_model is None:
            raise SettingsError(f"--{name.replace('_', '-')}: there is no edge model")
    if evaluation.edge_threads is not None:
        check_threads(evaluation.edge_threads)
    if evaluation.edge_memory is None:
        return None
    check_memory(cloud=cloud, device=models.device)
    return parse_bytes(evaluation.edge_memory)


# Loading ----------------------------------------------------------------------------------------------------


def _loaded(options: _Options, stack: ExitStack) -> tuple[EvalContext, Limits]:
    """Load the models. Return them with the limits of --edge-memory and --edge-threads as they were read back."""
    from outrider.cli.build import build_options, connected, find_target_tokenizer, load_drafter, load_lookup
    from outrider.evals.context import EvalContext
    from outrider.evals.modes import Setup
    from outrider.evals.resource_limits import PinnedEngine, address_space

    run, threads = options.run, options.evaluation.edge_threads
    memory_limit = None if options.memory is None else stack.enter_context(address_space(options.memory))
    limits: Limits = {"edge_threads": None, "edge_memory_bytes": memory_limit}
    draft: Engine | None
    try:
        verifier = stack.enter_context(connected(run.models, run.network))
        if threads is None:
            draft = load_drafter(run.models)
        else:
            draft = pinned = PinnedEngine(lambda: load_drafter(run.models), threads)
            limits["edge_threads"] = pinned.affinity
    except MemoryError as error:
        raise SettingsError(f"--edge-memory {options.evaluation.edge_memory}: the models do not fit") from error
    setup = Setup(run.decoding.settings(), build_options(run.speculation, run.network))
    lookup, tokenizer = load_lookup(run.models), find_target_tokenizer(options.target_tokenizer, draft, verifier)
    return EvalContext(draft, verifier, setup, options.assistant, lookup, tokenizer), limits


def _about(
    context: EvalContext,
    data: str,
    items: list[Item],
    modes: list[Mode],
    left_out: dict[str, str],
    options: _Options,
    limits: Limits,
) -> Row:
    from outrider.evals.context import describe_run

    secrets = ("token_file", "ca", "cert", "key")
    network = {name: value for name, value in asdict(options.run.network).items() if name not in secrets}
    more = {
        "asked": {**asdict(options.run.models), "target_tokenizer": options.target_tokenizer},
        "network": network,
        "limits": limits,
        "trace": options.evaluation.trace,
    }
    return describe_run(context, data, items, modes, left_out, **more)


# Running ----------------------------------------------------------------------------------------------------


def _run(context: EvalContext, items: list[Item], modes: list[Mode], store: Store, evaluation: Evaluation) -> None:
    from outrider.cli.progress import progress_bar
    from outrider.evals.runner import count_steps, run

    if evaluation.retry_failed:
        store.forget_failures()
    tracer = context.tracer() if evaluation.trace else None
    with progress_bar("eval", count_steps(items, modes, tracer)) as advance:
        run(items, modes, store, tracer, advance)


# Reporting --------------------------------------------------------------------------------------------------


def _summarise(items: list[Item], modes: list[str], store: Store, scoring: Scoring) -> dict[str, str]:
    """Write summary.json. Return the metrics that could not be computed, with the reasons."""
    from outrider.evals.scoring import quality, times

    results, unscored = store.results.rows, {}
    try:
        found = quality(items, modes, results, scoring)
    except SettingsError as error:  # an optional package is missing; the run itself does not need it
        found, unscored = {}, {"metrics of texts": str(error)}
    store.summarise({"modes": found, "latency": times(items, modes, results, store.timings.rows, scoring)})
    return unscored


def _report(store: Store, modes: list[str], left_out: dict[str, str], output: Output) -> int:
    from outrider.cli.escape import one_line
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
            error = f"{row['error']['type']}: {row['error']['message']}"
            print_message(one_line(f"outrider: {row['id']}, {row['mode']}: {error}"))
    return 1 if failed else 0


def _table(found: dict[str, dict[str, Any]]) -> Table:
    """Return a table of at most 80 columns.

    same: equal to cloud-only's tokens. TTFT: the median. up, down: bytes on the network.
    """
    from outrider.cli.terminal import borderless_table

    columns = ["items", "failed", "skipped", "same", "tok/s", "TTFT", "cloud", "accept", "up", "down"]
    if not any(one["skipped"] for one in found.values()):
        columns.remove("skipped")
    table = borderless_table(["mode", *columns], texts=("mode",), no_wrap=True)
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
