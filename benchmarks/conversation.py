"""The second turn of a conversation: its first token and its bytes, with the history kept and without it.

An `outrider cloud` in a process of its own verifies, or, with --random, one in this process. In turn, several times:
the question alone, the question after a history whose first turn was just generated, and the same prompt read from
nothing. Prompts are token ids, so that any pair will do. Prints medians, and one JSON line at the end.

    python -m benchmarks.conversation [--edge demo:edge] [--cloud demo:cloud] [--history 2000] [--question 20]
    python -m benchmarks.conversation --random [--history 2000]    random 0.5B and 7B on a GPU
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.random_models import counting, random_model
from benchmarks.remote import linked_cloud
from outrider import SpeculativeDecoder, connect, load_engine
from outrider.decoding.result import Result
from outrider.engines.prefix_cache import unique_salt
from outrider.engines.torch.engine import TorchEngine
from tests.support.cloud_server import serving

FIRST_TURN_TOKENS = 4


@contextmanager
def cloud(args: argparse.Namespace) -> Iterator[int]:
    """Serve the target, and yield the port."""
    if not args.random:
        with linked_cloud(args.cloud) as link:
            yield int(link.port or 0)
        return
    target = TorchEngine(counting(random_model("7B")), name="7B")
    with serving(target, max_length=4096, budget=2**33) as served:
        yield served.port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edge", default="demo:edge")
    parser.add_argument("--cloud", default="demo:cloud")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--history", type=int, default=2000)
    parser.add_argument("--question", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with cloud(args) as port:
        verifier = connect(f"grpc://127.0.0.1:{port}", deadline=300.0)
        edge = TorchEngine(random_model("0.5B"), name="0.5B") if args.random else load_engine(args.edge)
        decoder = SpeculativeDecoder(edge, verifier, k=5)
        choice = random.Random(0)

        def ids(count: int) -> list[int]:
            return [choice.randrange(10, min(edge.vocab_size, 50_000)) for _ in range(count)]

        def first_token(prompt: list[int], salt: str) -> Result:
            return decoder.generate(prompt, cache_salt=salt, max_new_tokens=1, ignore_eos=True)

        first_token(ids(args.question), unique_salt())
        runs: dict[str, list[Result]] = {"question alone": [], "second turn": [], "read from nothing": []}
        for _ in range(args.repeats):
            history, question, salt = ids(args.history), ids(args.question), unique_salt()
            runs["question alone"].append(first_token(question, unique_salt()))
            first = decoder.generate(history, cache_salt=salt, max_new_tokens=FIRST_TURN_TOKENS, ignore_eos=True)
            second = [*history, *first.token_ids, *question]
            runs["second turn"].append(first_token(second, salt))
            runs["read from nothing"].append(first_token(second, unique_salt()))
        verifier.disconnect()  # type: ignore[union-attr]
    pairs = zip(runs["second turn"], runs["read from nothing"], strict=True)
    equal = sum(kept.token_ids == anew.token_ids for kept, anew in pairs)
    medians = {}
    for name, results in runs.items():
        medians[name] = {
            "ttft_ms": round(1000 * statistics.median(each.stats.ttft_s for each in results), 2),
            "bytes_up": statistics.median(each.stats.bytes_up for each in results),
            "edge_cached": statistics.median(each.stats.edge_cached_tokens for each in results),
            "cloud_cached": statistics.median(each.stats.cloud_cached_tokens for each in results),
        }
        print(f"{name:>18}: {medians[name]}")
    ratio = medians["second turn"]["ttft_ms"] / medians["question alone"]["ttft_ms"]
    print(f"second turn ÷ question alone: {ratio:.2f}; {equal} of {args.repeats} equal to the prompt read from nothing")
    print(json.dumps({"benchmark": "conversation", **vars(args), "ratio": round(ratio, 3), "equal": equal, **medians}))


if __name__ == "__main__":
    main()
