"""Latency of eight clients while a ninth is at each of its limits.

    python -m benchmarks.cloud_limits [--seconds 10]

A cloud in a process of its own serves the bundled pair's target with tokens. Eight clients, each with an identity of
its own, request verdicts one after another. Then a ninth client in another process abuses one limit as fast as it can.
That process has the lowest priority, as if it ran on another machine: it takes only cores that the others leave idle.
Ends stdout with one JSON line: for each kind the ratio of the eight's median and mean latencies, the sessions that they
lost, and the growth of the server's memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from outrider import Audio, SpeculativeDecoder, load_engine
from outrider.cli.subprocess_cloud import cloud_process
from outrider.config import GenerationSettings
from outrider.engines.load import BUNDLED
from outrider.prompts.media import pack_audio
from outrider.protocol import schema
from outrider.protocol.messages import digest, pack_ids, pack_settings

MODEST = 8
CONTEXT = 4096
SESSION = f"/{schema.SERVICE}/Session"
Frames = Iterator[schema.Request]


class Client:
    """One identity's way to the cloud."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._metadata = (("authorization", f"Bearer {token}"),)
        data = self._channel.unary_unary(f"/{schema.SERVICE}/Describe")(b"", metadata=self._metadata, timeout=60)
        self.described = schema.DescribeAnswer.FromString(data)

    def stream(self, frames: Iterator[schema.Request | bytes]) -> Any:
        data = (frame if isinstance(frame, bytes) else frame.SerializeToString() for frame in frames)
        return self._channel.stream_stream(SESSION)(data, metadata=self._metadata)

    def open(self, ids: list[int], media: bytes = b"", limit: int = 2000) -> schema.Request:
        settings = GenerationSettings(max_new_tokens=limit, ignore_eos=True)
        return schema.Request(
            open=schema.Open(
                protocol=schema.VERSION,
                fingerprint=self.described.fingerprint,
                model=self.described.model,
                settings=pack_settings(settings),
                vocab_size=self.described.vocab_size,
                prompt=pack_ids(ids),
                media=schema.AUDIO if media else schema.NONE,
                conditioning=digest(ids, media),
            )
        )


def verify(round_: int, base: int) -> schema.Request:
    return schema.Request(verify=schema.Verify(round=round_, base_length=base, draft_ids=[20, 21, 22, 23, 24]))


# The eight ------------------------------------------------------------------------------------------------------------


def work(client: Client, until: float, taken: list[float], lost: list[str]) -> None:
    """Sessions of 60 verdicts each, one request at a time."""
    while time.monotonic() < until:
        wake, state = threading.Semaphore(0), [32]

        def frames(wake: threading.Semaphore = wake, state: list[int] = state) -> Frames:
            yield client.open(list(range(10, 10 + state[0])))
            for round_ in range(1, 61):
                wake.acquire()
                if time.monotonic() > until:
                    return
                yield verify(round_, state[0])

        answers = client.stream(frames())
        started = 0.0
        for data in answers:
            answer = schema.Answer.FromString(data)
            if answer.HasField("error"):
                lost.append(answer.error.message)
                break
            if answer.HasField("verdict"):
                taken.append(time.monotonic() - started)
                state[0] += answer.verdict.accepted + 1
            started = time.monotonic()
            wake.release()
        wake.release()


# The ninth ------------------------------------------------------------------------------------------------------------


def many_ids(client: Client, stop: Callable[[], bool]) -> None:
    """Openings with as many ids as a frame holds, one token counted often, and ids by the hundred thousand."""
    packed = schema.Ids(token=[1] * 250_000, count=[1] * 200_000)
    opening = client.open([1])
    opening.open.prompt.CopyFrom(packed)
    data = opening.SerializeToString()
    while not stop():
        drain(client.stream(iter([data])))


def long_prompts(client: Client, stop: Callable[[], bool]) -> None:
    """Sessions whose prompts fill the context, each verified once."""
    for n in count():
        if stop():
            return
        ids = [10 + (n + at) % 900 for at in range(CONTEXT - 10)]
        drain(client.stream(iter([client.open(ids), verify(1, len(ids))])))


def floods(client: Client, stop: Callable[[], bool]) -> None:
    """One repeated request, which costs the engine nothing."""

    def frames() -> Frames:
        yield client.open(list(range(10, 40)))
        while not stop():
            yield verify(1, 30)

    drain(client.stream(frames()))


def generations(client: Client, stop: Callable[[], bool]) -> None:
    """Cloud-only decoding."""
    while not stop():
        generate = schema.Request(generate=schema.Generate(round=1, base_length=30))
        drain(client.stream(iter([client.open(list(range(10, 40))), generate])))


def uploads(client: Client, stop: Callable[[], bool]) -> None:
    """Openings with megabytes of invalid recordings, kept open and unfinished."""
    part = schema.Request(media=schema.Media(data=bytes(400_000), more=True)).SerializeToString()
    opening = client.open([1], media=b"x")

    def frames() -> Iterator[schema.Request | bytes]:
        yield opening
        for _ in range(20):
            yield part
        while not stop():
            time.sleep(0.05)

    drain(client.stream(frames()))


def recordings(client: Client, stop: Callable[[], bool]) -> None:
    """Sessions with a recording, which has to be unpacked and encoded, each verified once."""
    prompt, media = RECORDING[0]
    while not stop():
        frames = [schema.Request(media=schema.Media(data=media)), verify(1, len(prompt))]
        drain(client.stream(iter([client.open(prompt, media), *frames])))


RECORDING: list[tuple[list[int], bytes]] = []


def prepare() -> None:
    """The longest bundled clip as the pair's prompt."""
    clip = max((BUNDLED / "clips").glob("*.flac"), key=lambda file: file.stat().st_size, default=None)
    clip = clip or next((BUNDLED / "clips").glob("*.*g*"))
    prompt = SpeculativeDecoder(load_engine("demo:edge")).encode(Audio(clip))
    assert prompt.audio is not None
    RECORDING.append((list(prompt.ids), pack_audio(prompt.audio)))


KINDS = {
    "many ids": (many_ids, 32),
    "long prompts": (long_prompts, 64),
    "a flood of repeats": (floods, 256),
    "cloud-only decoding": (generations, 256),
    "uploads": (uploads, 64),
    "recordings": (recordings, 64),
}


def drain(answers: Any) -> None:
    with suppress(grpc.RpcError):
        for _ in answers:
            pass


def harm(address: str, token: str, kind: str, over: Any) -> None:
    """In a process of its own: one identity with many streams."""
    os.nice(19)
    if kind == "recordings":
        prepare()
    client = Client(address, token)
    do, streams = KINDS[kind]
    threads = [threading.Thread(target=do, args=(client, over.is_set), daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    over.wait()


# Together -------------------------------------------------------------------------------------------------------------


def measure(address: str, tokens: list[str], seconds: float) -> tuple[list[float], list[str]]:
    taken: list[float] = []
    lost: list[str] = []
    until = time.monotonic() + seconds
    clients = [Client(address, token) for token in tokens]
    threads = [threading.Thread(target=work, args=(client, until, taken, lost)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken, lost


def memory() -> int:
    """Resident bytes of the cloud's process, the first child of this one (Linux)."""
    children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    return int(Path(f"/proc/{children[0]}/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--kind", choices=KINDS, action="append")
    given = parser.parse_args()
    names = [f"client-{n}" for n in range(MODEST + 1)]
    tokens = [secrets.token_hex(16) for _ in names]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens"
        file.touch(0o600)
        file.write_text("".join(f"{name} {token}\n" for name, token in zip(names, tokens, strict=True)))
        with cloud_process("demo", "--tokens", str(file), "--max-context", str(CONTEXT)) as address:
            result = {kind: ratio(address, tokens, kind, given.seconds) for kind in given.kind or KINDS}
    print(json.dumps({"benchmark": "cloud_limits", "others": MODEST, "kinds": result}))
    return 0


def ratio(address: str, tokens: list[str], kind: str, seconds: float) -> dict[str, Any]:
    """The eight alone, then beside the ninth."""
    alone, _ = measure(address, tokens[1:], seconds)
    before = memory()
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    ninth = context.Process(target=harm, args=(address, tokens[0], kind, over))
    ninth.start()
    time.sleep(5.0)  # until it is at its limit
    beside, lost = measure(address, tokens[1:], seconds)
    growth = memory() - before
    over.set()
    ninth.join(5.0)
    ninth.kill()
    found = {
        "median_ratio": round(statistics.median(beside) / statistics.median(alone), 2),
        "mean_ratio": round(statistics.mean(beside) / statistics.mean(alone), 2),
        "alone_ms": round(1000 * statistics.median(alone), 1),
        "lost_sessions": len(lost),
        "growth_mib": round(growth / 2**20),
    }
    print(f"{kind}: {found}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
