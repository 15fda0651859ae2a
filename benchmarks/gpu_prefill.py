"""Time to the first token on a GPU: prompts of several lengths, a recording, and what others wait meanwhile.

Random bfloat16 models of real sizes. In the engine: a prompt as a whole, and in chunks. In the service: the first token
of a prompt through the batcher, alone and beside sessions that ask for verdicts all the time, and the median and the
longest time of their rounds. A recording of 30 s on Qwen2.5-Omni's thinker: features, encoder, prefill. Medians in
milliseconds, or the least of few runs. Last comes one JSON line.

    python -m benchmarks.gpu_prefill [--model 7B] [--lengths 200 2000 8000] [--sessions 32] [--no-recording]
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers

from benchmarks.cloud_batches import Client
from benchmarks.random_models import PLACEHOLDER, counting, random_model, random_thinker
from outrider.cloud.batcher import Batcher
from outrider.cloud.metrics import Metrics
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.engines.scheduler import prefill_chunk
from outrider.engines.torch.engine import TorchEngine

K = 5


def milliseconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time of a call until the GPU is idle."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(times), 2)


def ids_of(engine: TorchEngine, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(10, engine.vocab_size // 2, (length,), generator=generator).tolist()


def in_engine(engine: TorchEngine, length: int, chunk: int) -> float:
    """Return the time of a prefill in chunks."""
    slot, ids = engine.open(Prompt((1,))), ids_of(engine, length)

    def run() -> None:
        engine.truncate(slot, 0)
        for at in range(0, length, chunk):
            engine.forward(slot, ids[at : at + chunk], 1)

    found = milliseconds(run)
    engine.close(slot)
    return found


class Crowd:
    """Sessions that ask for one verdict after another, each in a thread of its own. times: of their rounds, in ms."""

    def __init__(self, engine: TorchEngine, batcher: Batcher, count: int, rounds: int) -> None:
        self.times: list[float] = []
        self._batcher, self._stopped = batcher, threading.Event()
        self._clients = [Client(engine, 1000, 0.8, seed, rounds) for seed in range(count)]
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in self._clients]

    def _ask(self, client: Client) -> None:
        while not self._stopped.is_set():
            started = time.perf_counter()
            session = client.entry.session
            drafts = tuple((session.ids[-1] + n) % 50_000 + 10 for n in range(1, K + 1))
            request = Verify(session.rounds + 1, len(session.ids), (), drafts)
            self._batcher.submit(client.entry, request).result()
            self.times.append(1000 * (time.perf_counter() - started))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            self._batcher.release(client.entry)


def first_token(engine: TorchEngine, batcher: Batcher, length: int) -> float:
    """Return the time of a new session's first token."""
    client = Client(engine, length, 1.0, length, 4)
    started = time.perf_counter()
    batcher.submit(client.entry, Verify(1, length, (), ())).result()
    found = 1000 * (time.perf_counter() - started)
    batcher.release(client.entry)
    return found


def in_service(engine: TorchEngine, lengths: Sequence[int], sessions: int) -> dict[str, float]:
    """Return first tokens, alone and beside a crowd, and the crowd's rounds, while nothing else runs and meanwhile."""
    batcher = Batcher(engine, sessions + 1, Metrics())
    batcher.start()
    found = {}
    for length in lengths:
        times = [first_token(engine, batcher, length) for _ in range(5)]
        found[f"first_token_{length}"] = round(statistics.median(times[1:]), 2)
    crowd = Crowd(engine, batcher, sessions, 4000)
    crowd.start()
    time.sleep(3)
    crowd.times.clear()
    time.sleep(1)
    undisturbed = list(crowd.times)
    found["round_ms"] = round(statistics.median(undisturbed), 2)
    found["round_ms_longest"] = round(max(undisturbed), 2)
    for length in lengths:
        first_token(engine, batcher, length)  # captures what it needs
        crowd.times.clear()
        times = [first_token(engine, batcher, length) for _ in range(3)]
        meanwhile = list(crowd.times)
        found[f"first_token_{length}_beside_{sessions}"] = round(statistics.median(times), 2)
        found[f"round_ms_beside_{length}"] = round(statistics.median(meanwhile), 2)
        found[f"round_ms_longest_beside_{length}"] = round(max(meanwhile), 2)
    crowd.stop()
    batcher.stop()
    return found


def of_recording(seconds: int) -> dict[str, float]:
    """Return the parts of a recording's time to the first token on the 7B thinker."""
    model, extractor = random_thinker("7B")
    engine = TorchEngine(model, None, extractor, name="thinker")
    waveform = (0.1 * np.random.default_rng(0).standard_normal(seconds * 16_000)).astype(np.float32)
    count = engine.audio.token_count(len(waveform))
    ids = (*range(20, 30), *[PLACEHOLDER] * count, *range(20, 60))
    features = engine.audio.features(waveform)

    def first(prompt: Prompt) -> None:
        slot = engine.open(prompt)
        engine.forward(slot, ids, 1)
        engine.close(slot)

    with torch.inference_mode():
        encoder = milliseconds(lambda: engine.audio.embed_features(features))
    return {
        "prompt_tokens": len(ids),
        "features_ms": milliseconds(lambda: engine.audio.features(waveform)),
        "encoder_ms": encoder,
        "first_token_of_features_ms": milliseconds(lambda: first(Prompt(ids, features=features))),
        "first_token_of_waveform_ms": milliseconds(lambda: first(Prompt(ids, waveform))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 2000, 8000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 384, 512])
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--no-recording", action="store_true")
    args = parser.parse_args()
    engine = TorchEngine(counting(random_model(args.model)), name=args.model)
    print(f"{args.model}: chunks of {prefill_chunk(engine)} tokens in the service")
    results: dict[str, object] = {}
    for length in args.lengths:
        found = {str(chunk): in_engine(engine, length, chunk) for chunk in (length, *args.chunks) if chunk <= length}
        results[f"engine_{length}"] = found
        print(f"{length:6d} tokens, by chunk: {found}", flush=True)
    results["service"] = served = in_service(engine, args.lengths, args.sessions)
    print("\n".join(f"{name:36s} {value:9.2f}" for name, value in served.items()), flush=True)
    del engine
    torch.cuda.empty_cache()
    if not args.no_recording:
        results["recording"] = heard = of_recording(30)
        print("\n".join(f"{name:36s} {value:9.2f}" for name, value in heard.items()))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(
        json.dumps({"benchmark": "gpu_prefill", "card": torch.cuda.get_device_name(), **versions, "results": results})
    )


if __name__ == "__main__":
    main()
