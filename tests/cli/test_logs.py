"""What --verbose shows: all that is ours, and of others no more than without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.network  # each starts a process, which takes seconds

SAY = """
import logging
from outrider.cli.options import Output
from outrider.cli.terminal import configure_logging

configure_logging(Output(verbose={verbose}))
for name in ("outrider", "outrider.verifiers.retry", "httpx", "httpcore.http11", "httpx2", "asyncio", "urllib3"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(level, "%s says %s", name, logging.getLevelName(level))
"""


@pytest.mark.parametrize("verbose", [True, False])
def test_only_our_own_details_are_told(verbose: bool) -> None:
    command = [sys.executable, "-c", SAY.format(verbose=verbose)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    assert "httpcore.http11 says WARNING" in told
    assert "outrider.verifiers.retry says WARNING" in told
    details = [line for line in told.splitlines() if "says DEBUG" in line or "says INFO" in line]
    assert all("outrider" in line for line in details)
    assert len(details) == (4 if verbose else 0)
