"""What a verdict costs on a serving engine, by the length of what came before: does the prefix cache carry it?

Against a running vLLM server, the ways to get the rows of k drafts, in turn:

    tail        one sequence, the prefix cache at work (vllm://, started with --enable-scale-out)
    spread      k+1 prompts, the prefix cache at work (vllm:// where scale-out is off)
    anew        one sequence read from its beginning: what prompt_logprobs cost on /v1/completions
    generated   k+1 tokens that the server generates by itself, the prefix cached

Each session grows by one accepted block and one bonus a round, as in decoding, and asks in each of the ways in turn.
Medians over the rounds of several sessions, without the reading of the prompt. Ends with one JSON line.

    python -m benchmarks.engines vllm://127.0.0.1:8000 [--contexts 150 1500] [--k 5] [--rounds 5] [--sessions 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import product
from typing import TypeVar

from outrider.transport.event_loop_thread import EventLoopThread
from outrider.transport.http_client import HttpClient
from outrider.verifiers.connect import parse_cloud_address
from outrider.verifiers.llm_server.backend import Capabilities, LogprobsRequest, fetch_logprobs
from outrider.verifiers.llm_server.vllm import DEFAULT_PARAMS, PER_PREFIX, PROMPT_LOGPROBS, VllmBackend

T = TypeVar("T")

WAYS = ("tail", "spread", "anew", "generated")
WAIT = 600.0  # s


class Server:
    """A vLLM server, and how to ask it in each of the ways. k: drafts in a block."""

    def __init__(self, client: HttpClient, capabilities: Capabilities, k: int) -> None:
        self.client, self.capabilities, self.k = client, capabilities, k

    async def round(self, way: str, ids: list[int], session: str) -> None:
        """One round on ids, the last k of them drafts."""
        if way == "generated":
            await self._generate(ids[: -self.k], session)
            return
        capabilities = replace(self.capabilities, mode=PER_PREFIX if way == "spread" else PROMPT_LOGPROBS)
        await fetch_logprobs(
            VllmBackend(),
            self.client,
            LogprobsRequest(ids, self.k + 1, 2, session, skip_cache=way == "anew"),
            capabilities,
            WAIT,
        )

    async def _generate(self, ids: list[int], session: str) -> None:
        body = {
            **DEFAULT_PARAMS,
            "model": self.capabilities.model,
            "prompt": ids,
            "cache_salt": session,
            "max_tokens": self.k + 1,
        }
        reply = await self.client.post("/v1/completions", {**body, "ignore_eos": True}, WAIT)
        if reply.status != 200:
            raise SystemExit(f"{self.client.name}: {reply.error}")


async def session(server: Server, context: int, rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Milliseconds of each way's rounds. The tokens are any: what they are changes nothing in the work.

    Each way has drafts of its own, or it would find another's in the cache; those of `tail` stay, as if accepted.
    """
    key = uuid.uuid4().hex
    ids = tokens(rng, context)
    await server.round("tail", [*ids, *tokens(rng, server.k)], key)  # reads the prompt
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for n in range(rounds):
        ids += tokens(rng, server.k + 1)
        drafts = {way: tokens(rng, server.k) for way in WAYS}
        for way in rng.sample(WAYS, len(WAYS)):
            if way != "anew" or n == 0:  # once a session: it takes as long as the prompt
                started = time.perf_counter()
                await server.round(way, [*ids, *drafts[way]], key)
                times[way].append(1000 * (time.perf_counter() - started))
        ids += drafts["tail"]
    return times


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(20, 900) for _ in range(count)]


async def measure(server: Server, contexts: list[int], rounds: int, sessions: int) -> dict[str, dict[int, float]]:
    """Median milliseconds of a round, by way and context."""
    rng = random.Random(0)
    await session(server, 64, 1, rng)  # the first requests of a server are not like the others
    times: dict[tuple[str, int], list[float]] = {case: [] for case in product(WAYS, contexts)}
    for _ in range(sessions):
        for context in rng.sample(contexts, len(contexts)):
            for way, found in (await session(server, context, rounds, rng)).items():
                times[way, context] += found
    return {way: {context: statistics.median(times[way, context]) for context in contexts} for way in WAYS}


def in_worker(host: tuple[str, int], work: Callable[[HttpClient], Awaitable[T]]) -> T:
    """Run `work` with a client of the server, in an event loop's own thread."""
    worker = EventLoopThread("benchmark", [host])

    async def run() -> T:
        client = HttpClient(worker.endpoints[0], *host, None, None)
        try:
            return await work(client)
        finally:
            await client.close()

    try:
        return worker.run(run()).result()
    finally:
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--contexts", type=int, nargs="+", default=[150, 1500])
    for name, default in (("k", 5), ("rounds", 5), ("sessions", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    (host,) = parse_cloud_address(options.server).hosts

    async def work(client: HttpClient) -> dict[str, dict[int, float]]:
        server = Server(client, await VllmBackend().probe(client), options.k)
        return await measure(server, options.contexts, options.rounds, options.sessions)

    found = in_worker(host, work)
    assert isinstance(found, dict)
    first, last = min(options.contexts), max(options.contexts)
    print(f"{'ms per round':14s}" + "".join(f"{context:>9}" for context in options.contexts) + "    growth")
    growth = {}
    for way, times in found.items():
        growth[way] = round(times[last] / times[first], 2)
        print(f"{way:14s}" + "".join(f"{times[c]:9.0f}" for c in options.contexts) + f"{growth[way]:10.2f}")
    setting = {name: value for name, value in vars(options).items() if name != "server"}
    print(json.dumps({"benchmark": "engines", **setting, "ms": found, "growth": growth}))


if __name__ == "__main__":
    main()
