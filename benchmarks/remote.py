"""What the benchmarks of the network share: a cloud process, a link of our own before it, and what to decode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.link_thread import LinkThread
from outrider.cli.subprocess_cloud import cloud_process
from outrider.engines.load import BUNDLED
from outrider.netem.conditions import parse_conditions
from outrider.prompts.audio import Audio


@contextmanager
def linked_cloud(model: str, net: str = "none") -> Iterator[LinkThread]:
    """`outrider cloud MODEL` behind an emulated network; its counters are the socket's."""
    with cloud_process(model) as address:
        host, _, port = address.rpartition(":")
        with LinkThread(host, int(port), parse_conditions(net)) as link:
            yield link


def captions() -> list[Audio]:
    """The bundled clips, each with the detailed task in its own language."""
    clips = json.loads((BUNDLED / "clips" / "clips.json").read_text(encoding="utf-8"))
    return [Audio(BUNDLED / "clips" / clip["file"], lang=clip["lang"], task="detailed") for clip in clips]


def texts(file: str, count: int) -> list[Any]:
    """The first `count` prompts of a Spec-Bench file, as chat messages."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines[:count]]
