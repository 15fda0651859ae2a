"""A directory as `outrider eval` and `sweep` leave it, from real runs of the bundled pair.

    python -m tests.support.report_sample OUT

With a network it runs against a cloud in a second process behind a link of 40 ms; without, in this process.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
import transformers

import outrider
from benchmarks.link_thread import LinkThread
from outrider.api import SpeculativeDecoder, local
from outrider.cli.subprocess_cloud import cloud_process
from outrider.decoding.gate import SIGNAL_NAMES, Signals, compute_signals
from outrider.decoding.result import Result
from outrider.engines.base import CachedSequence
from outrider.engines.load import BUNDLED, load_engine
from outrider.netem.conditions import Conditions
from outrider.planning.traces import Trace
from outrider.prompts.audio import Audio
from outrider.verifiers.base import Verifier
from outrider.verifiers.connect import connect
from outrider.verifiers.remote.verifier import RemoteVerifier

CLIPS = json.loads((BUNDLED / "clips" / "clips.json").read_text(encoding="utf-8"))
TASKS = ("default", "detailed", "concise")
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, pipelined": {"driver": "pipelined"},
    "entropy:0.3": {"gate": "entropy:0.3"},
    "entropy:1.2": {"gate": "entropy:1.2"},
    "edge only": {"gate": "never"},
}
GATES = ("always", "entropy:0.1", "entropy:0.3", "entropy:0.8", "entropy:1.6", "margin:0.2", "margin:0.6", "never")
TIMES = ("ttft_s", "total_s", "draft_s", "wait_s", "queue_s", "verify_s")


def job(n: int) -> Audio:
    clip = CLIPS[n]
    return Audio(BUNDLED / "clips" / clip["file"], lang=clip["lang"], task=TASKS[n % len(TASKS)])


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


class Sample:
    """Both engines, and the settings that every run shares; sampled at 1.0, where the pair disagrees now and then."""

    def __init__(self, clips: list[int], tokens: int) -> None:
        self.draft, self.target = load_engine("demo"), load_engine(str(BUNDLED / "cloud"))
        self.clips, self.settings = clips, {"max_new_tokens": tokens, "temperature": 1.0, "seed": 7}

    def decoder(self, verifier: Verifier | None = None, **options: Any) -> SpeculativeDecoder:
        return SpeculativeDecoder(draft=self.draft, verifier=verifier or local(self.target), **options)

    def run(self, decoder: SpeculativeDecoder) -> Iterator[tuple[int, Result]]:
        for n in self.clips:
            yield n, decoder.generate(job(n), **self.settings)

    def signals(self, decoder: SpeculativeDecoder, n: int, result: Result) -> list[tuple[int, Signals]]:
        """The drafter's own token and how sure it was of it, at each position of an output."""
        prompt = decoder.encode(job(n))
        reader = CachedSequence(self.draft, prompt, "drafter")
        try:
            rows = reader.extend(list(prompt.ids) + result.token_ids[:-1], len(result.token_ids))
            best = [int(row.argmax()) for row in rows]
            return [(token, compute_signals(row, token, 1.0)) for row, token in zip(rows, best, strict=True)]
        finally:
            reader.close()


def answers(sample: Sample, folder: Path, modes: list[str], verifier: Callable[[], Verifier | None]) -> None:
    """results.jsonl, timings.jsonl and traces.jsonl."""
    results, timings, traces = [], [], []
    for mode in modes:
        given = verifier()
        options = {k: v for k, v in MODES[mode].items() if given is not None or k != "driver"}
        decoder = sample.decoder(given, **options)
        for n, result in sample.run(decoder):
            name = CLIPS[n]["file"].partition(".")[0]
            judged = sample.signals(decoder, n, result)
            row = result.to_json()
            signals = [{name: round(getattr(s, name), 6) for name in SIGNAL_NAMES} for _, s in judged]
            results.append({"id": name, "mode": mode, **row, "pieces": result.pieces, "signals": signals})
            spent = {key: row["stats"][key] for key in TIMES}
            timings.append({"id": name, "mode": mode, **spent, "bytes": {"up": {}, "down": {}, **result.ledger}})
            if mode == "exact":
                draft, sure = zip(*judged, strict=True)
                traces.append(Trace(name, result.prompt_tokens, tuple(result.token_ids), draft, sure))
    write_lines(folder / "results.jsonl", results)
    write_lines(folder / "timings.jsonl", timings)
    write_lines(folder / "traces.jsonl", [trace.to_json() for trace in traces])


def swept(
    sample: Sample, verifier: Verifier | None, rtt_ms: float, gates: tuple[str, ...], drivers: list[str]
) -> list[Any]:
    """Each gate and driver at one round-trip time; disagreement is what difflib finds changed of the exact output."""
    exact = {n: result.token_ids for n, result in sample.run(sample.decoder())}
    rows = []
    for driver in drivers:
        for gate in gates:
            results = dict(sample.run(sample.decoder(verifier, gate=gate, driver=driver)))
            changed = [difference(exact[n], result.token_ids) for n, result in results.items()]
            cloud = sum(r.stats.cloud_tokens for r in results.values())
            total = sum(len(r.token_ids) for r in results.values())
            seconds = sum(r.stats.total_s for r in results.values()) / len(results)
            figures = {"cloud_share": cloud / total, "disagreement": fmean(changed), "total_s": seconds}
            named = {"gate": gate, "k": 5, "driver": driver, "rtt_s": rtt_ms / 1000}
            rows.append({**named, **figures, "disagreement_ci": interval(changed)})
    return rows


def difference(one: list[int], other: list[int]) -> float:
    return 1 - SequenceMatcher(None, one, other, autojunk=False).ratio()


def interval(values: list[float], draws: int = 1000) -> list[float]:
    """Of their mean: percentiles of a bootstrap."""
    rng = Random(0)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    return [means[draws * 25 // 1000], means[draws * 975 // 1000]]


def about(folder: Path, sample: Sample) -> None:
    versions = {"outrider": outrider.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    value = {
        "configuration": {"edge": "demo", "cloud": "demo", "k": 5, "settings": sample.settings},
        "versions": {**versions, "python": platform.python_version()},
        "hardware": {"machine": platform.machine(), "system": platform.system(), "threads": torch.get_num_threads()},
    }
    (folder / "run.json").write_text(json.dumps(value), encoding="utf-8")


def small(folder: Path) -> None:
    """Two clips in this process, seconds."""
    sample = Sample([0, 6], tokens=16)
    about(folder, sample)
    answers(sample, folder, ["exact", "entropy:0.3"], lambda: None)
    sample.clips = [6]
    write_lines(folder / "sweep.jsonl", swept(sample, None, 0.0, ("always", "never"), ["sequential"]))


@contextmanager
def behind(port: int, rtt_ms: float) -> Iterator[Verifier | None]:
    with LinkThread("127.0.0.1", port, Conditions(rtt=rtt_ms / 1000)) as link:
        verifier = connect(f"grpc://127.0.0.1:{link.port}")
        yield verifier
        if isinstance(verifier, RemoteVerifier):
            verifier.disconnect()


def large(folder: Path) -> None:
    """All clips and modes across a network, minutes."""
    sample = Sample(list(range(len(CLIPS))), tokens=96)
    about(folder, sample)
    with cloud_process("demo") as address:
        port = int(address.rpartition(":")[2])
        with behind(port, 40) as verifier:
            answers(sample, folder, list(MODES), lambda: verifier)
        rows = [{**row, "rtt_s": None} for row in swept(sample, None, 0.0, GATES, ["sequential"])]
        write_lines(folder / "sweep.jsonl", rows)
        sample.clips = [0, 3, 6, 7]
        for rtt in (10.0, 80.0, 200.0):
            with behind(port, rtt) as verifier:
                rows += across(swept(sample, verifier, rtt, ("always", "entropy:0.3"), ["sequential", "pipelined"]))
    write_lines(folder / "sweep.jsonl", rows)


def across(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only what the network changes: their shares are of fewer clips."""
    return [{k: v for k, v in row.items() if "disagreement" not in k and k != "cloud_share"} for row in rows]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    large(place)
