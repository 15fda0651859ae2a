"""Many streaming clients for minutes: every text right, memory flat, who leaves frees a slot within a second.

OUTRIDER_SOAK_SECONDS=60 OUTRIDER_SOAK_CLIENTS=32 pytest -m soak -s tests/gateway/test_soak.py
"""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import psutil
import pytest

from outrider import Audio, SpeculativeDecoder, load_engine
from tests.support.gateway_process import CLIPS, edge, figure, heard

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "300"))
CLIENTS = int(os.environ.get("OUTRIDER_SOAK_CLIENTS", "32"))
SLOTS = 8
LEAVING = 0.1  # of the requests
PROMPTS = ["The speaker", "说话人", "hello", "This is"]
GROWTH = 32 * 2**20  # bytes that a process may grow by after its first minute, or first fifth


@dataclass(frozen=True)
class Job:
    """A request, and the text that plain decoding of the cloud's model answers it with."""

    body: dict[str, Any]
    chat: bool
    expected: str


@dataclass
class Found:
    """What the clients saw."""

    right: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def jobs() -> list[Job]:
    plain = SpeculativeDecoder(load_engine("demo:cloud"), None, on_loop="ignore")
    made = []
    for clip in json.loads((CLIPS / "clips.json").read_text(encoding="utf-8")):
        options = {"outrider": {"lang": clip["lang"], "on_loop": "ignore"}}
        text = plain.generate(Audio(CLIPS / clip["file"], lang=clip["lang"])).text
        made.append(Job(heard(clip["file"], extra_body=options), True, str(text)))
    for prompt in PROMPTS:
        body = {"model": "outrider", "prompt": prompt, "max_tokens": 48}
        text = plain.generate(prompt, max_new_tokens=48).text
        made.append(Job({**body, "extra_body": {"outrider": {"on_loop": "ignore"}}}, False, str(text)))
    return made


def ask(client: openai.OpenAI, job: Job, leaves: bool, found: Found) -> None:
    create: Any = client.chat.completions.create if job.chat else client.completions.create
    began, first, text = time.monotonic(), 0.0, ""
    stream = create(**job.body, stream=True, extra_headers={"x-soak": "1"})
    for chunk in stream:
        text += (chunk.choices[0].delta.content if job.chat else chunk.choices[0].text) or ""
        first = first or time.monotonic() - began
        if leaves and text:
            stream.close()
            break
    with found.lock:
        found.first.append(first)
        found.left += leaves
        found.right += not leaves and text == job.expected
        if not (job.expected.startswith(text) if leaves else text == job.expected):
            found.wrong.append(f"{text!r}, not {job.expected!r}")


def work(url: str, number: int, ready: list[Job], until: float, found: Found) -> None:
    draw = random.Random(number)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        while time.monotonic() < until:
            ask(client, draw.choice(ready), draw.random() < LEAVING, found)


def releases(url: str, count: int = 10) -> list[float]:
    """Seconds from a client's leaving to the first token of a request that waited for its slot: all slots are taken."""
    long = {"model": "outrider", "prompt": "hello", "max_tokens": 800, "stream": True}
    long["outrider"] = {"ignore_eos": True, "on_loop": "ignore"}
    short, found = {**long, "max_tokens": 1}, []
    for _ in range(count):
        with ExitStack() as stack:
            streams = [
                stack.enter_context(httpx2.stream("POST", f"{url}/v1/completions", json=long, timeout=120))
                for _ in range(SLOTS)
            ]
            kept = [stream.iter_lines() for stream in streams]  # one that is dropped closes its connection
            for lines in kept:
                first_data(lines)
            waiting = stack.enter_context(httpx2.stream("POST", f"{url}/v1/completions", json=short, timeout=120))
            assert figure(url, "outrider_edge_waiting") == 1, "it has no slot before somebody leaves"
            left = time.monotonic()
            streams[0].close()
            first_data(waiting.iter_lines())
            found.append(time.monotonic() - left)
    return found


def first_data(lines: Iterator[str]) -> str:
    return next(line for line in lines if line.startswith("data:"))


def memory(process: psutil.Process) -> dict[str, int]:
    """Resident bytes of the gateway and of its cloud."""
    cloud = max(process.children(), key=lambda child: child.memory_info().rss)
    return {"edge": process.memory_info().rss, "cloud": cloud.memory_info().rss}


def test_many_clients_for_minutes() -> None:
    ready, found = jobs(), Found()
    with edge("--slots", str(SLOTS), "--queue", str(2 * CLIENTS)) as (url, child):
        process, began = psutil.Process(child.pid), time.monotonic()
        until = began + SECONDS
        with ThreadPoolExecutor(CLIENTS) as threads:
            busy = [threads.submit(work, url, n, ready, until, found) for n in range(CLIENTS)]
            time.sleep(min(60.0, SECONDS / 5))
            early = memory(process)
            for each in busy:
                each.result()
        late = memory(process)
        deadline = time.monotonic() + 1
        while figure(url, "outrider_edge_active") and time.monotonic() < deadline:
            time.sleep(0.02)
        active = figure(url, "outrider_edge_active")
        found.freed = releases(url)
    figures = {
        "seconds": round(time.monotonic() - began, 1),
        "clients": CLIENTS,
        "right": found.right,
        "wrong": len(found.wrong),
        "left": found.left,
        "first_median_s": round(statistics.median(found.first), 3),
        "freed_s": [round(max(found.freed), 3), round(statistics.median(found.freed), 3)],
        "rss_mib": {name: [round(m[name] / 2**20) for m in (early, late)] for name in early},
    }
    print(json.dumps(figures))  # noqa: T201
    assert not found.wrong, found.wrong[:3]
    assert found.right > CLIENTS
    assert max(found.freed) < 1
    assert active == 0
    assert all(late[name] - early[name] < GROWTH for name in early)
