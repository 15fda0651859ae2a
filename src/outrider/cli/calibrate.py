"""`outrider calibrate`: find a gate within a risk budget from traces, and write it to a file."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.build import check_connection, connected, load_drafter
from outrider.cli.options import Connection, Models
from outrider.cli.terminal import borderless_table, print_json, print_message, stdout
from outrider.config import GenerationSettings, Loss
from outrider.decoding.gate_file import ModelId
from outrider.errors import SettingsError
from outrider.planning.calibrate import AUDIT, Calibration, calibrate, write_gate_file
from outrider.planning.provenance import Description, check_provenance, describe_pair
from outrider.planning.traces import find_traces, read_traces

HIGH_ESCALATION = 0.9  # share of blocks above which the gate saves too little for its risk


def run_calibrate(
    traces: str,
    out: str,
    epsilon: float,
    k: int,
    edge: Description,
    cloud: Description,
    settings: GenerationSettings,
    *,
    loss: Loss = "outputs",
    audit: float = AUDIT,
    seed: int = 0,
    json_output: bool = False,
) -> int:
    """Find the gate, write it to `out` and print a summary.

    traces: the file of the traces, or the directory of the run with it. edge, cloud, settings: the pair
    (`describe_pair`) and the settings that the traces were recorded with.

    Raises:
        SettingsError: the run.json next to the traces names another pair or other settings.
    """
    file = find_traces(traces)
    known = read_traces(file)
    check_traces(file, edge, cloud, settings)
    found = calibrate(
        known,
        epsilon=epsilon,
        k=k,
        edge=_model_id(edge),
        cloud=_model_id(cloud),
        settings=settings,
        loss=loss,
        audit=audit,
        seed=seed,
    )
    write_gate_file(out, found)
    if json_output:
        print_json({"file": out, **found.to_json()})
    else:
        _show(found, out, len(known))
    return 0


def check_traces(file: Path, edge: Description, cloud: Description, settings: GenerationSettings) -> None:
    """Print a message if no run.json next to traces names their pair and settings.

    Raises:
        SettingsError: it names another pair or other settings.
    """
    if not check_provenance(file, edge=edge, cloud=cloud, settings=settings):
        print_message(f"outrider: no run.json next to {file} names the pair and settings of its traces: not checked")


def load_descriptions(models: Models, network: Connection = Connection()) -> tuple[Description, Description]:
    """Load or connect to edge and cloud, and return their descriptions for a gate file.

    Raises:
        SettingsError: one of them is missing.
    """
    models.require_edge_model("a calibrated gate")
    if "none" in (models.edge, models.cloud):
        raise SettingsError("a gate is calibrated for a pair: give --edge and --cloud")
    check_connection(models, network)
    with connected(models, network) as verifier:
        return describe_pair(load_drafter(models), verifier)  # type: ignore[arg-type]


def _model_id(description: Description) -> ModelId:
    return ModelId(description["name"], description["vocabulary"], description["quantization"])


def _show(found: Calibration, out: str, traces: int) -> None:
    """Print the calibration. traces: the number of all traces, with those that chose the signal."""
    console, chose = stdout(), traces - found.traces
    console.print(
        f"on the {chose} of {traces} traces that chose the signal (the sentence below counts the other {found.traces})",
        style="dim",
        soft_wrap=True,
    )
    table = borderless_table(("signal", "threshold", "risk", "escalated"), texts=("signal",))
    chosen = found.gate.partition(":")[0]
    for row in found.signals:  # on the traces that chose among them
        threshold = "–" if row.threshold is None else f"{row.threshold:.4g}"
        cells = (row.signal, threshold, _percent(row.risk), _percent(row.escalation))
        table.add_row(*cells, style="bold" if row.signal == chosen else None)
    console.print(table)
    lost = {
        "outputs": f"at most {_percent(found.risk)} of {found.traces} outputs would differ from the cloud's",
        "tokens": f"at most {_percent(found.risk)} of the cloud's tokens in {found.traces} outputs would follow a "
        "wrong one",
    }
    saves_little = ": it saves nearly nothing" if found.escalation > HIGH_ESCALATION else ""
    console.print(
        f"{found.gate}: {_percent(found.escalation)} of blocks go to the cloud, audits included{saves_little}. "
        f"With the rest left to the edge, {lost[found.loss]}: within the budget of {_percent(found.epsilon)}.\n"
        f"Written to {out}: --gate calibrated:{out} --k {found.k}",
        soft_wrap=True,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
