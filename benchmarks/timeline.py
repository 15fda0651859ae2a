"""Timeline of a service at work: host spans of its threads, and the busy intervals of the GPU, on one clock.

`record` wraps named methods of live objects for the length of a `with` block and, on a GPU, runs torch's profiler for
the kernels. `summarise` gives the share of time in which a kernel runs, and the host's own time by span. `to_svg` draws
a part of it.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

MERGE_NS = 5_000  # shorter gaps between two kernels are launch overhead inside a graph, not idle time
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d", "#bab0ac")


@dataclass
class Timeline:
    """spans: (thread, name, start, end), nested ones too. gpu: merged (start, end). Times are ns since the epoch."""

    spans: list[tuple[str, str, int, int]] = field(default_factory=list)
    gpu: list[tuple[int, int]] = field(default_factory=list)
    start: int = 0
    end: int = 0


@contextmanager
def record(targets: Seq[tuple[Any, str]]) -> Iterator[Timeline]:
    """Record calls of the methods `targets` (object, name) and, on a GPU, its kernels, into the yielded timeline."""
    timeline, originals = Timeline(), [(owner, name, getattr(owner, name)) for owner, name in targets]
    for owner, name, method in originals:
        setattr(owner, name, _recorded(timeline, name.strip("_"), method))
    try:
        if torch.cuda.is_available():
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                timeline.start = time.time_ns()
                yield timeline
                timeline.end = time.time_ns()
            timeline.gpu = _kernels(profile)
        else:
            timeline.start = time.time_ns()
            yield timeline
            timeline.end = time.time_ns()
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def _recorded(timeline: Timeline, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.time_ns()
        try:
            return method(*args, **kwargs)
        finally:
            timeline.spans.append((threading.current_thread().name, name, started, time.time_ns()))

    return call


def _kernels(profile: Any) -> list[tuple[int, int]]:
    """Return the merged intervals of kernels and copies."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    times = sorted((base + int(1000 * e["ts"]), base + int(1000 * (e["ts"] + e["dur"]))) for e in events)
    merged: list[tuple[int, int]] = []
    for start, end in times:
        if merged and start - merged[-1][1] <= MERGE_NS:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def own_times(spans: Seq[tuple[str, str, int, int]]) -> dict[str, int]:
    """Return the ns in each span by name, without the spans inside it."""
    totals: defaultdict[str, int] = defaultdict(int)
    by_thread: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for thread, name, start, end in spans:
        by_thread[thread].append((start, -end, name))
    for entries in by_thread.values():
        open_spans: list[tuple[int, str]] = []
        for start, minus_end, name in sorted(entries):
            while open_spans and open_spans[-1][0] <= start:
                open_spans.pop()
            if open_spans:
                totals[open_spans[-1][1]] -= -minus_end - start
            totals[name] += -minus_end - start
            open_spans.append((-minus_end, name))
    return dict(totals)


def summarise(timeline: Timeline, steps: int) -> dict[str, Any]:
    """Return ms per step: in all, of the GPU, and of the host by span."""
    total = timeline.end - timeline.start
    busy = sum(min(end, timeline.end) - max(start, timeline.start) for start, end in timeline.gpu if end > start)
    host = {name: round(ns / 1e6 / steps, 3) for name, ns in own_times(timeline.spans).items()}
    ordered = dict(sorted(host.items(), key=lambda item: -item[1]))
    return {"ms": round(total / 1e6 / steps, 3), "gpu_ms": round(busy / 1e6 / steps, 3), "host_ms": ordered}


def to_svg(timelines: dict[str, Timeline], width_ms: float = 30.0) -> str:
    """Draw `width_ms` from the middle of each timeline: a row of the GPU, and one of each host thread."""
    scale, row, label = 900 / width_ms, 26, 170
    names = sorted({name for each in timelines.values() for _, name, _, _ in each.spans})
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(names)}
    parts: list[str] = []
    y = 20
    for title, timeline in timelines.items():
        start = (timeline.start + timeline.end) // 2
        threads = sorted({thread for thread, _, _, _ in timeline.spans})
        parts.append(f'<text x="4" y="{y}" font-weight="bold">{title}</text>')
        rows: list[tuple[str, list[tuple[str, int, int]]]] = [
            ("GPU", [("GPU", *interval) for interval in timeline.gpu]),
            *((t, [s[1:] for s in sorted(timeline.spans, key=lambda s: s[2] - s[3]) if s[0] == t]) for t in threads),
        ]
        for thread, spans in rows:
            y += row
            parts.append(f'<text x="4" y="{y + 12}">{thread}</text>')
            for name, begun, ended in spans:
                left, right = (begun - start) / 1e6, (ended - start) / 1e6
                if right > 0 and left < width_ms:
                    x, w = label + scale * max(left, 0), scale * (min(right, width_ms) - max(left, 0))
                    colour = colours.get(name, "#333333")
                    parts.append(f'<rect x="{x:.1f}" y="{y}" width="{max(w, 0.4):.1f}" height="18" fill="{colour}"/>')
        y += row + 14
    for n, name in enumerate(names):
        x = label + 110 * (n % 8)
        parts.append(f'<rect x="{x}" y="{y + 16 * (n // 8)}" width="10" height="10" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9 + 16 * (n // 8)}">{name}</text>')
    y += 16 * (1 + len(names) // 8)
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1080" height="{y + 10}" font-family="sans-serif" '
    return f'{head}font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
