"""`outrider edge` in a process of its own, and what the tests ask it."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

import outrider
from tests.support.processes import HANG_S, started

CLIPS = Path(outrider.__file__).parent / "demo" / "clips"


@contextmanager
def edge(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yields its URL and the process; at the end it must end in order, and have said no word too many."""
    command = [sys.executable, "-m", "outrider", "edge", "--listen", "127.0.0.1:0", "--json", *options]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        try:
            assert line, child.stderr and child.stderr.read()
            yield json.loads(line)["listening"], child
        finally:
            child.terminate()
            _, said = child.communicate(timeout=HANG_S)
        assert child.returncode == 0, said
        assert "Traceback" not in said, said


def heard(clip: str, **more: Any) -> dict[str, Any]:
    """A chat request with a bundled clip."""
    data = base64.b64encode((CLIPS / clip).read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "ogg"}}
    return {"model": "outrider", "messages": [{"role": "user", "content": [part]}], **more}


def figure(url: str, name: str) -> float:
    """A figure of /metrics."""
    found = re.search(rf"^{name} (\S+)$", httpx2.get(f"{url}/metrics").text, re.M)
    assert found, name
    return float(found[1])
