"""Tilings of the fused stack's matrix product for few tokens, against cuBLAS, at the shapes of a model.

Weights rotate among copies larger than the cache, so that each is read from memory, as in a model. Times are those of
replayed CUDA graphs, medians; last comes one JSON line. This is where `kernels.skinny_tiling` has its numbers from.

    python -m benchmarks.gpu_linear [--tokens 1 6]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

SHAPES = {  # name: (width, size, gated, normed)
    "0.5B qkv": (1152, 896, False, True),
    "0.5B out": (896, 896, False, False),
    "0.5B gate up": (4864, 896, True, True),
    "0.5B down": (896, 4864, False, False),
    "head 896": (152_064, 896, False, True),
    "7B qkv": (4608, 3584, False, True),
    "7B out": (3584, 3584, False, False),
    "7B gate up": (18_944, 3584, True, True),
    "7B down": (3584, 18_944, False, False),
    "head 3584": (152_064, 3584, False, True),
}
Tiling = tuple[int, int, int, int]  # stripe, depth, warps, stages
TILINGS: list[Tiling] = list(itertools.product((1, 2, 4, 8), (512, 1024, 2048), (2, 4, 8), (1, 3)))
CACHE = 200_000_000  # bytes of weights to rotate among


def tilings(shape: str) -> list[Tiling]:
    """Those that give each thread 8 to 64 entries of a weight at a time, and waste less than half of a line."""
    _, size, gated, _ = SHAPES[shape]
    return [
        tiling
        for tiling in TILINGS
        if 8 <= tiling[0] * tiling[1] * (1 + gated) // (32 * tiling[2]) <= 64
        and tiling[1] < 2 * size
        and (tiling[3] == 1 or size > tiling[1])
    ]


def launch(x: Tensor, weight: Tensor, out: Tensor, norm: Tensor, shape: str, tiling: Tiling) -> None:
    from outrider.engines.torch.kernels import skinny_linear

    width, size, gated, normed = SHAPES[shape]
    stripe, depth, warps, stages = tiling
    skinny_linear[(-(-width // stripe),)](
        x, weight, None, norm if normed else None, out, size, width, 1e-6, False, normed, gated, not normed, len(x),
        stripe, depth, stages, num_warps=warps,
    )  # fmt: skip


def compile_some(part: list[tuple[str, Tiling]]) -> None:
    """In a process of its own: fill Triton's cache on the disk."""
    for shape, tiling in part:
        try_launch(*operands(shape, 1, 1), shape, tiling)


def operands(shape: str, tokens: int, copies: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    width, size, gated, _ = SHAPES[shape]
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    weights = [torch.randn(width * (1 + gated), size, **make) for _ in range(copies)]  # type: ignore[call-overload]
    x, out, norm = (torch.randn(*dims, **make) for dims in ((tokens, size), (tokens, width), (size,)))  # type: ignore[call-overload]
    return x, weights, out, norm


def try_launch(x: Tensor, weights: list[Tensor], out: Tensor, norm: Tensor, shape: str, tiling: Tiling) -> bool:
    from triton.runtime.errors import OutOfResources

    try:
        launch(x, weights[0], out, norm, shape, tiling)
    except OutOfResources:
        return False
    return True


def timed(run: Callable[[Tensor], object], weights: list[Tensor], repeats: int = 7) -> float:
    """Microseconds of one run."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(weights))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--processes", type=int, default=12)
    args = parser.parse_args()
    work = [(shape, tiling) for shape in SHAPES for tiling in tilings(shape)]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_some, [work[n :: args.processes] for n in range(args.processes)]))
    results = {}
    for shape, (width, size, gated, _) in SHAPES.items():
        bytes_read = 2 * width * (1 + gated) * size
        for tokens in args.tokens:
            x, weights, out, norm = operands(shape, tokens, max(1, CACHE // bytes_read))
            found = {}
            for tiling in tilings(shape):
                if try_launch(x, weights, out, norm, shape, tiling):
                    found[tiling] = timed(partial(launch, x, out=out, norm=norm, shape=shape, tiling=tiling), weights)
            library = timed(partial(torch.nn.functional.linear, x), weights)
            best = sorted(found, key=found.__getitem__)[:4]
            results[f"{shape}, {tokens}"] = {
                "floor_us": bytes_read / 3.0e6,
                "cublas_us": library,
                "best": [(*tiling, round(found[tiling], 2)) for tiling in best],
            }
            listed = ", ".join(f"{tiling} {found[tiling]:.1f}" for tiling in best)
            print(f"{shape:14s} {tokens:3d} tokens: floor {bytes_read / 3e6:6.1f} us, cuBLAS {library:6.1f}; {listed}")
            del weights
    print(json.dumps({"benchmark": "gpu_linear", "card": torch.cuda.get_device_name(), "results": results}))


if __name__ == "__main__":
    main()
