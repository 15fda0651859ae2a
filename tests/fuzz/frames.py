"""Feed the cloud frames that no edge would send, for as long as asked: `python -m tests.fuzz.frames --seconds 60`.

The same frames as tests/cloud/test_fuzz.py uses, from new seeds. A failure names the seed and the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time

from tests.support.service_fuzzer import Bystander, Tally, fuzz_directly

GROWTH = 200 * 1024  # KiB of memory that a run may add
PART = 20.0  # s on one service


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="the first; drawn at random otherwise")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    until, before = time.monotonic() + given.seconds, 0
    while time.monotonic() < until:
        end, tally, bystander = min(until, time.monotonic() + PART), Tally(), Bystander()
        print(f"seed {seed}", flush=True)  # noqa: T201
        asyncio.run(fuzz_directly(tally, bystander, seed, lambda _, end=end: time.monotonic() > end))
        assert bystander.verdicts > 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{tally.read} frames, {bystander.verdicts} verdicts beside them, {peak // 1024} MiB", flush=True)  # noqa: T201
        before = before or peak
        assert peak - before < GROWTH, "memory grows"
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
