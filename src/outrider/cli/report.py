"""`outrider report`: evaluations in, one page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from outrider.evals.digest import unfinished
from outrider.evals.report import write_report


def run_report(dirs: Sequence[str], out: str) -> int:
    """Write the page about the evaluations in `dirs` to the file `out`."""
    runs = write_report([Path(name) for name in dirs], Path(out))
    said = [f"outrider: {line}" for run in runs if (line := unfinished(run))]
    stderr = Console(stderr=True)
    for line in (*said, f"{out}: {Path(out).stat().st_size:,} bytes"):
        stderr.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    return 0
