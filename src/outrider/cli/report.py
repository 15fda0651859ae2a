"""`outrider report`: evaluations in, one page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.cli.terminal import print_message
from outrider.evals.report import write_report
from outrider.evals.report_sections import unfinished


def run_report(dirs: Sequence[str], out: str) -> int:
    """Write the page about the evaluations in `dirs` to the file `out`."""
    runs = write_report([Path(name) for name in dirs], Path(out))
    lines = [f"outrider: {line}" for run in runs if (line := unfinished(run))]
    for line in (*lines, f"{out}: {Path(out).stat().st_size:,} bytes"):
        print_message(line, "dim")
    return 0
