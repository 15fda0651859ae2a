"""A GGUF pair on a CPU: Outrider with a llama.cpp target, against llama.cpp and transformers with the same files.

Every mode decodes every prompt in turn, in a random order, with the same number of threads, greedily. Modes:

    llama.cpp plain, lookup, draft k    llama-cpp-python's `generate`: alone, with its own prompt lookup, and with the
                                        edge's file behind its interface for draft models
    local plain, k, auto                Outrider with `--cloud local:X.gguf`, without and with a drafter
    grpc plain, k, auto                 the same with `outrider cloud X.gguf` over loopback
    grpc … × N                          N edges at once, each with a drafter of its own, tokens of all of them
    dense plain, assisted k             transformers' `generate` and assisted generation, with --dense

With --clock cpu, the times are processor seconds of this process, for a machine on which other work runs. Set
OMP_NUM_THREADS=1 with it, since threads that wait for others spin. The controller of `auto` still measures real time.

Reported are medians over prompts and repeats of milliseconds per token after the first verdict. `auto` is compared with
the best of plain and fixed k of its own kind, turn by turn. The last line is JSON.

    python -m benchmarks.gguf_pair EDGE.gguf CLOUD.gguf PROMPTS.jsonl [--parts llama,local,grpc,edges,dense]
        [--count 6] [--tokens 48] [--repeats 1] [--ks 1,2,4] [--edges 3] [--clock real] [--dense EDGE_DIR CLOUD_DIR]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu_pair import Clock, Run, Way, ours, peers
from benchmarks.exactness import prompts
from outrider.api import SpeculativeDecoder, local
from outrider.cli.subprocess_cloud import cloud_process
from outrider.engines.base import Engine
from outrider.engines.load import load_engine
from outrider.verifiers.base import Verifier
from outrider.verifiers.connect import connect

CLOCKS: dict[str, Clock] = {"real": time.perf_counter, "cpu": time.process_time}


# llama.cpp --------------------------------------------------------------------------------------------------------


def llama(path: str, length: int, **options: Any) -> Any:
    import llama_cpp

    threads = torch.get_num_threads()
    return llama_cpp.Llama(path, n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False, **options)


def own(clock: Clock, model: Any, draft: Any = None) -> Way:
    """llama-cpp-python's own loop. A burst of tokens within 5 ms comes from one forward."""

    def run(ids: list[int], tokens: int) -> Run:
        model.draft_model = draft
        model.reset()  # else it reuses the cache of the last prompt
        started, first, count, out = clock(), 0.0, 0, []
        for token in model.generate(ids, temp=0.0):
            out.append(token)
            first = first or clock()
            count += clock() - first < 0.005
            if len(out) == tokens or token == model.token_eos():
                break
        return Run(out, first - started, count, clock() - started)

    return run


def model_drafts(model: Any, k: int) -> Callable[..., Any]:
    """The edge's file behind llama-cpp-python's interface for draft models."""

    def draft(input_ids: Any, /, **_: Any) -> Any:
        stream = model.generate(input_ids.tolist(), temp=0.0)
        return np.array([next(stream) for _ in range(k)], dtype=np.intc)

    return draft


def llama_ways(clock: Clock, edge: str, cloud: str, length: int, ks: list[int]) -> Iterator[tuple[str, Way]]:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    plain, drafted, drafter = llama(cloud, length), llama(cloud, length, logits_all=True), llama(edge, length)
    yield "llama.cpp plain", own(clock, plain)
    yield "llama.cpp lookup", own(clock, drafted, LlamaPromptLookupDecoding(num_pred_tokens=2))
    for k in ks:
        yield f"llama.cpp draft {k}", own(clock, drafted, model_drafts(drafter, k))


# Outrider ---------------------------------------------------------------------------------------------------------


def outrider_ways(
    kind: str, edge: Engine, verifier: Verifier, ks: list[int], clock: Clock = time.perf_counter
) -> Iterator[tuple[str, Way]]:
    yield f"{kind} plain", ours(SpeculativeDecoder(None, verifier, reader=edge), clock)
    lengths: list[int | str] = [*ks, "auto"]
    for k in lengths:
        yield f"{kind} {k}", ours(SpeculativeDecoder(edge, verifier, k=k), clock)


def crowd(kind: str, edges: list[Engine], address: str, ks: list[int]) -> Iterator[tuple[str, Way]]:
    """Edges that decode the same prompt at once, each over a connection of its own."""
    clouds = [connect(f"grpc://{address}", deadline=300.0) for _ in edges]
    each = [dict(outrider_ways(kind, edge, cloud, ks)) for edge, cloud in zip(edges, clouds, strict=True) if cloud]
    pool = ThreadPoolExecutor(len(edges))

    def run(name: str, ids: list[int], tokens: int) -> Run:
        started = time.perf_counter()
        runs = list(pool.map(lambda ways: ways[name](ids, tokens), each))
        first = max(one.first_s for one in runs)
        total = [token for one in runs for token in one.tokens]
        return Run(total, first, sum(one.first_tokens for one in runs), time.perf_counter() - started)

    for name in each[0]:
        yield f"{name} × {len(edges)}" if len(edges) > 1 else name, partial(run, name)


def dense_ways(clock: Clock, edge: Any, cloud: Any, ks: list[int]) -> Iterator[tuple[str, Way]]:
    eos = cloud.eos_ids[0]
    yield "dense plain", peers(cloud.model, eos, clock=clock)
    for k in ks:
        yield f"dense assisted {k}", peers(cloud.model, eos, edge.model, k, clock=clock)


# Measurement ------------------------------------------------------------------------------------------------------


def decode_ms(run: Run) -> float:
    return 1000 * (run.total_s - run.first_s) / max(len(run.tokens) - run.first_tokens, 1)


def measure(ways: dict[str, Way], texts: list[list[int]], tokens: int, repeats: int) -> dict[str, list[Run]]:
    """The runs of each way, in the same order of prompts. `auto` learns from the first prompt before that."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for name in ways:
        ways[name](texts[0], tokens if "auto" in name else 2)
    for n, ids in enumerate(texts * repeats):
        for name in random.Random(n).sample(list(ways), len(ways)):
            runs[name].append(ways[name](ids, tokens))
            print(f"{n:3d} {len(ids):4d} prompt tokens  {name:24s} {decode_ms(runs[name][-1]):8.1f}", flush=True)
    return runs


def against_best(auto: str, ms: dict[str, list[float]]) -> dict[str, Any]:
    """`auto` of a kind against its plain decoding, and against the best of plain and fixed k, turn by turn."""
    rivals = [name for name in ms if re.sub(r" (plain|\d+)", " auto", name, count=1) == auto != name]
    best = min(rivals, key=lambda name: statistics.median(ms[name]))
    ratios = {name: statistics.median(a / b for a, b in zip(ms[name], ms[auto], strict=True)) for name in rivals}
    return {
        "best": best,
        "auto_against_best": round(ratios[best], 3),
        "ratios": {n: round(r, 3) for n, r in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edge")
    parser.add_argument("cloud")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--parts", default="llama,local,grpc")
    for name, default in (("count", 6), ("tokens", 48), ("repeats", 1), ("edges", 3), ("longest", 120)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ks", default="1,2,4")
    parser.add_argument("--dense", nargs=2, metavar=("EDGE_DIR", "CLOUD_DIR"))
    parser.add_argument("--dtype", default="bfloat16", help="of the dense models")
    parser.add_argument("--clock", choices=CLOCKS, default="real")
    args = parser.parse_args()
    clock = CLOCKS[args.clock]
    parts, ks = args.parts.split(","), [int(k) for k in args.ks.split(",")]
    edge = load_engine(args.edge)
    found = prompts(args.prompts, 8 * args.count)
    texts = [list(SpeculativeDecoder(edge).encode([{"role": "user", "content": text}]).ids) for text in found]
    texts = [ids for ids in texts if len(ids) <= args.longest][: args.count]
    with ExitStack() as stack:
        ways: dict[str, Way] = {}
        if "llama" in parts:
            ways |= llama_ways(clock, args.edge, args.cloud, args.longest + args.tokens + 32, ks)
        if "local" in parts:
            ways |= outrider_ways("local", edge, local(load_engine(args.cloud)), ks, clock)
        if "grpc" in parts or "edges" in parts:
            address = stack.enter_context(cloud_process(args.cloud))
        if "grpc" in parts:
            ways |= crowd("grpc", [edge], address, ks)
        if "edges" in parts:
            ways |= crowd("grpc", [edge, *(load_engine(args.edge) for _ in range(args.edges - 1))], address, ks)
        if args.dense:
            pair = [load_engine(name, dtype=args.dtype, device="cpu") for name in args.dense]
            ways |= dense_ways(clock, pair[0], pair[1], ks)
        runs = measure(ways, texts, args.tokens, args.repeats)
    report(args, ks, texts, runs)


def report(args: argparse.Namespace, ks: list[int], texts: list[list[int]], runs: dict[str, list[Run]]) -> None:
    ms = {name: [decode_ms(run) for run in found] for name, found in runs.items()}
    medians = {name: round(statistics.median(values), 1) for name, values in ms.items()}
    whole = {
        n: round(statistics.median(1000 * r.total_s / len(r.tokens) for r in found), 1) for n, found in runs.items()
    }
    for name, value in sorted(medians.items(), key=lambda pair: pair[1]):
        print(f"{name:24s} {value:8.1f} ms per token, {whole[name]:8.1f} with the prompt")
    found = {auto: against_best(auto, ms) for auto in ms if " auto" in auto}
    same = {n: sum(a.tokens == b.tokens for a, b in zip(runs[n], next(iter(runs.values())), strict=True)) for n in runs}
    setting = {
        "prompts": len(texts),
        "tokens": args.tokens,
        "repeats": args.repeats,
        "threads": torch.get_num_threads(),
    }
    result = {"benchmark": "gguf_pair", **setting, "ms": medians, "ms_with_prompt": whole, "auto": found, "same": same}
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
