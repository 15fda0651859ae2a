"""Latency per token across a network: sequential and pipelined, against the formula with measured inputs.

docs/design/maths.md: sequential latency per token = [k·t_d + S_up/B_up + RTT + t_queue + t_v + S_dn/B_dn] / E.
Every input is measured here: t_d from the drafter's own steps in the same run, t_queue and t_v from the verdicts, RTT
by an echo through a link of the same conditions, E as tokens per round. The first round (prefill, media) is left
out on both sides. Drivers are interleaved; medians over clips and repeats; ends with one JSON line.

    python benchmarks/network.py [--net rtt=50ms] [--k 5] [--repeats 3] [--edge demo:edge] [--cloud demo:cloud]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.link_thread import LinkThread
from benchmarks.remote import captions, texts
from outrider import SpeculativeDecoder, connect, load_engine
from outrider.cli.subprocess_cloud import cloud_process
from outrider.config import DriverName
from outrider.engines.prefix_cache import unique_salt
from outrider.netem.conditions import parse_conditions
from outrider.sampling.acceptance import Verdict


@dataclass
class Observed:
    """A verifier that notes each verdict's times; a drafter's engine that notes each step's."""

    verdicts: list[Verdict] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def watch_engine(self, engine: Any) -> None:
        forward = engine.forward

        def timed(slot: int, ids: Any, rows: int | None = None) -> Any:
            started = time.perf_counter()
            out = forward(slot, ids, rows)
            if len(ids) <= 2:  # no prefill
                self.steps.append(time.perf_counter() - started)
            return out

        engine.forward = timed

    def watch_verifier(self, verifier: Any) -> None:
        submit = verifier.submit

        def noted(session: int, request: Any) -> Any:
            answer = submit(session, request)
            answer.add_done_callback(lambda done: self.verdicts.append(done.result()))
            return answer

        verifier.submit = noted


def measured_rtt(net: str, pings: int = 15) -> float:
    """The median echo time of a small message through a link of these conditions, in seconds."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        client, _ = listener.accept()
        with client, suppress(ConnectionResetError):
            while data := client.recv(1024):
                client.sendall(data)

    threading.Thread(target=echo, daemon=True).start()
    times = []
    with (
        LinkThread("127.0.0.1", listener.getsockname()[1], parse_conditions(net)) as link,
        socket.create_connection(("127.0.0.1", link.port)) as client,
    ):
        for _ in range(pings):
            started = time.perf_counter()
            client.sendall(b"x" * 40)
            client.recv(1024)
            times.append(time.perf_counter() - started)
    listener.close()
    return statistics.median(times[2:])  # the first ones wait for the handshake


def decode(decoder: SpeculativeDecoder, prompt: Any, tokens: int) -> tuple[float, int, Any]:
    """Seconds and tokens after the first round, and the result."""
    stream, moments = decoder.stream(prompt, cache_salt=unique_salt(), max_new_tokens=tokens), []
    try:
        while event := next(stream):
            if event.kind != "provisional":
                moments.append(time.perf_counter())
    except StopIteration as end:
        result = end.value
    later = [moment for moment in moments if moment > moments[0] + 0.005]
    return moments[-1] - moments[0], len(later), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edge", default="demo:edge")
    parser.add_argument("--cloud", default="demo:cloud")
    parser.add_argument("--net", default="rtt=50ms")
    parser.add_argument("--prompts", help="a Spec-Bench file; the bundled clips otherwise")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the cloud process has the other core
    prompts = texts(args.prompts, args.count) if args.prompts else captions()
    rtt = measured_rtt(args.net)
    with cloud_process(args.cloud) as address:
        verifier = connect(f"grpc://{address}", net=args.net, deadline=300.0)
        edge, seen = load_engine(args.edge), Observed()
        seen.watch_engine(edge)
        seen.watch_verifier(verifier)
        drivers: tuple[DriverName, ...] = ("sequential", "pipelined")
        decoders = {name: SpeculativeDecoder(edge, verifier, k=args.k, driver=name) for name in drivers}
        for decoder in decoders.values():
            decoder.generate(prompts[0], max_new_tokens=16)
        rows = [measure(decoders, prompt, args, seen, rtt) for prompt in prompts for _ in range(args.repeats)]
        verifier.disconnect()  # type: ignore[union-attr]
    report(rows, args, rtt)


def measure(
    decoders: dict[DriverName, SpeculativeDecoder], prompt: Any, args: argparse.Namespace, seen: Observed, rtt: float
) -> dict[str, float]:
    """One prompt with both drivers; the formula for the sequential one."""
    row: dict[str, float] = {}
    for name, decoder in decoders.items():
        seen.verdicts.clear()
        seen.steps.clear()
        seconds, tokens, result = decode(decoder, prompt, args.tokens)
        row[name] = seconds / tokens
        if name == "sequential":
            verdicts, steps = seen.verdicts[1:], statistics.median(seen.steps)
            drafted = result.stats.drafted / result.stats.rounds
            cloud = statistics.fmean(v.queue_s + v.compute_s for v in verdicts)
            row["formula"] = (drafted * steps + rtt + cloud) * len(verdicts) / tokens
            row |= {"t_d": steps, "t_v": cloud, "E": tokens / len(verdicts)}
            row["acceptance"] = result.stats.acceptance_rate
    row["saved"] = 1 - row["pipelined"] / row["sequential"]
    return row


def report(rows: list[dict[str, float]], args: argparse.Namespace, rtt: float) -> None:
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ratio = statistics.median(row["sequential"] / row["formula"] for row in rows)
    print(
        f"measured RTT {rtt * 1e3:.1f} ms, t_d {median['t_d'] * 1e3:.2f} ms, t_queue + t_v {median['t_v'] * 1e3:.2f} ms"
    )
    print(f"E {median['E']:.2f} tokens per round, acceptance {median['acceptance']:.2f}")
    for name in ("formula", "sequential", "pipelined"):
        print(f"{name:>10}  {median[name] * 1e3:7.2f} ms per token")
    print(f"sequential ÷ formula {ratio:.3f} (median)")
    print(
        f"pipelined saves {100 * median['saved']:.0f} % (median), {100 * min(r['saved'] for r in rows):.0f} % at least"
    )
    print(
        json.dumps({"benchmark": "network", **vars(args), "rtt": rtt, "ratio": ratio, "median": median, "runs": rows})
    )


if __name__ == "__main__":
    main()
