"""`outrider edge` as a process: its start, its own cloud's death and return, and signals at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import psutil
import pytest

from tests.support.gateway_process import running_gateway
from tests.support.processes import HANG_S, started, wait_until

COMMAND = [sys.executable, "-m", "outrider", "edge", "--listen", "127.0.0.1:0"]
pytestmark = pytest.mark.network


@contextmanager
def starting(*options: str) -> Iterator[subprocess.Popen[str]]:
    with started([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        yield child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["its cloud is started", "loading", "waiting", "starting to serve"])
def test_a_signal_during_the_start_ends_it_with_its_code_and_leaves_no_child(moment: str, number: int) -> None:
    with starting() as child:
        process = psutil.Process(child.pid)
        assert child.stderr is not None
        if moment == "its cloud is started":
            wait_until(process.children)
        else:
            wait_until(lambda: moment in child.stderr.readline())  # type: ignore[union-attr]
        children = process.children()
        child.send_signal(number)
        time.sleep(0.05)  # scripted: apart from the first, or the system merges them
        child.send_signal(number)  # a second one changes nothing
        said = child.communicate(timeout=HANG_S)[1]
        assert child.returncode == (0 if "serving http" in said else 128 + number)
        assert "Traceback" not in said
        assert "never retrieved" not in said
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert children
    assert not alive


def test_a_cloud_of_its_own_that_dies_is_started_again_and_health_says_so_meanwhile() -> None:
    body = {"model": "outrider", "prompt": "hello", "max_tokens": 5}
    with running_gateway() as (url, child):
        health = httpx2.get(f"{url}/health").json()
        assert (health["status"], health["reason"]) == ("ok", None)
        for _ in range(2):
            cloud = psutil.Process(child.pid).children()[0]
            os.kill(cloud.pid, signal.SIGKILL)
            health = wait_until(lambda: (found := httpx2.get(f"{url}/health").json())["status"] == "degraded" and found)
            assert "SIGKILL" in health["reason"] or "cannot be reached" in health["reason"]
            wait_until(lambda: httpx2.get(f"{url}/health").json()["status"] == "ok")
        reply = wait_until(lambda: (r := httpx2.post(f"{url}/v1/completions", json=body, timeout=60)).is_success and r)
        assert reply.json()["outrider"]["guarantee"] == "exact"


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
@pytest.mark.parametrize(("loss", "guarantee"), [("edge-only", "edge-only"), ("fail", None)])
def test_cutting_a_run_cuts_that_run(driver: str, loss: str, guarantee: str | None, own: str) -> None:
    options = {"net": "rtt=100ms", "on_cloud_loss": loss, "driver": driver, "ignore_eos": True, "on_loop": "ignore"}
    body = {"model": "outrider", "prompt": "hello", "max_tokens": 200, "stream": True, "outrider": options}
    with (
        httpx2.stream("POST", f"{own}/v1/completions", json=body, timeout=60) as cut,
        httpx2.stream("POST", f"{own}/v1/completions", json=body, timeout=60) as other,
    ):
        lines = cut.iter_lines()
        next(lines)
        assert httpx2.post(f"{own}/v1/outrider/cut/{cut.headers['x-request-id']}").json() == {"cut": True}
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        whole = [json.loads(line[6:]) for line in other.iter_lines() if line.startswith("data: {")]
    if guarantee is None:
        assert events[-1]["error"]["code"] == "cloud_lost"
    else:
        assert events[-1]["outrider"]["guarantee"] == guarantee
        assert events[-1]["outrider"]["stats"]["cloud_lost"]
    assert whole[-1]["outrider"]["guarantee"] == "exact", "another run goes on"


def test_prompt_lookup_serves_without_an_edge_model() -> None:
    body = {"model": "outrider", "prompt": [5, 6, 7, 5, 6], "max_tokens": 12}
    with running_gateway("--edge", "lookup:demo") as (url, _):
        overview = httpx2.get(f"{url}/v1/outrider").json()
        assert (overview["edge"], overview["drafter"]) == ("lookup:demo", "lookup")
        texts = []
        for way in ("speculative", "cloud-only"):
            reply = httpx2.post(f"{url}/v1/completions", json={**body, "outrider": {"way": way}}, timeout=60).json()
            assert reply["outrider"]["guarantee"] == "exact"
            texts.append(reply["choices"][0]["text"])
        assert texts[0] == texts[1] != ""
        refused = httpx2.post(f"{url}/v1/completions", json={**body, "outrider": {"way": "edge-only"}}, timeout=60)
        assert refused.status_code == 400
        assert "needs a draft model" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def own() -> Iterator[str]:
    with running_gateway() as (url, _):
        yield url


def test_a_run_that_there_is_not_cannot_be_cut(own: str) -> None:
    assert httpx2.post(f"{own}/v1/outrider/cut/cmpl-1").status_code == 404


def test_a_remote_cloud_that_is_away_degrades_health() -> None:
    with running_gateway("--cloud", "grpc://127.0.0.1:9", "--patience", "0.2", "--on-cloud-loss", "edge-only") as (
        url,
        _,
    ):
        health = httpx2.get(f"{url}/health").json()
    assert health["status"] == "degraded"
    assert health["reason"] == "the cloud has not been reached yet"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["loading", "reserving"])
def test_a_cloud_that_is_ended_while_it_starts_says_so_by_its_code(moment: str, number: int) -> None:
    command = [sys.executable, "-m", "outrider", "cloud", "demo", "--listen", "127.0.0.1:0"]
    with started(command, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        wait_until(lambda: moment in child.stderr.readline())  # type: ignore[union-attr]
        child.send_signal(number)
        said = child.communicate(timeout=HANG_S)[1]
    drained, ended = 0, 128 + number
    if "serving demo" in said:
        assert child.returncode == drained
    else:  # the service may drain already, just before it says that it serves
        assert child.returncode in ((ended,) if moment == "loading" else (drained, ended))
    assert "Traceback" not in said
    assert "never retrieved" not in said
