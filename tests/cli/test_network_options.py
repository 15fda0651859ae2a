"""The options of the network and of `outrider cloud`: what is wrong is named, before any model is loaded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

import outrider
import outrider.verifiers.connect  # before anything below patches what it imports
from benchmarks.link_thread import LinkThread
from outrider.cli import main
from outrider.cli.exit_codes import run_guarded
from outrider.cli.subprocess_cloud import cloud_process
from outrider.engines.load import BUNDLED
from outrider.netem.conditions import Conditions
from tests.support.certificates import Authority
from tests.support.ports import ReservedPort
from tests.support.processes import HANG_S, started, wait_until

pytestmark = pytest.mark.network

GRPC = ["generate", "hi", "--cloud", "grpc://127.0.0.1:1"]
GENERATE = ["generate", "--prompt-ids", "5 6 7", "--ignore-eos", "--json", "--max-new-tokens"]


def run(*arguments: str) -> int:
    """The command line in this process."""
    return run_guarded(partial(main._run, list(arguments)), list(arguments))


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("outrider.engines.load.load_engine", refuse)
    monkeypatch.setattr("outrider.verifiers.connect.load_engine", refuse)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "hi", "--cloud", "grpc://"], "grpc://HOST:PORT"),
        (["generate", "hi", "--cloud", "grpc://host"], "grpc://HOST:PORT"),
        (["generate", "hi", "--cloud", "grpc://host:0"], "grpc://HOST:PORT"),
        (["generate", "hi", "--cloud", "grpc://host:70000"], "grpc://HOST:PORT"),
        (["generate", "hi", "--cloud", "grpc:host:7070"], "grpc://HOST:PORT"),
        (["generate", "hi", "--cloud", "grpc://user@host:7070"], "grpc://HOST:PORT"),
        (["generate", "hi", "--driver", "pipelined"], "pipelined"),
        (["generate", "hi", "--driver", "parallel"], "parallel"),
        (["generate", "hi", "--on-cloud-loss", "wait"], "--on-cloud-loss"),
        (["generate", "hi", "--net", "rtt=50ms"], "--net"),
        (["generate", "hi", "--ca", "ca.pem"], "--ca"),
        ([*GRPC, "--net", "rtt=50"], "rtt"),
        ([*GRPC, "--net", "ping=50ms"], "ping"),
        ([*GRPC, "--ca", "/no/such.pem"], "/no/such.pem"),
        ([*GRPC, "--cert", "/no/such.pem"], "/no/such.pem"),
        ([*GRPC, "--token-file", "/no/such"], "/no/such"),
        ([*GRPC, "--deadline", "0"], "deadline"),
        ([*GRPC, "--patience", "-1"], "patience"),
        ([*GRPC, "--edge", "none", "--on-cloud-loss", "edge-only"], "edge-only"),
        ([*GRPC, "--edge", "none", "--driver", "pipelined"], "pipelined"),
        ([*GRPC, "--edge", "/no/such/model"], "/no/such/model"),
        ([*GRPC, "--privacy", "secret"], "secret"),
        (["generate", "hi", "--cloud", "none", "--privacy", "tokens"], "privacy"),
        (["cloud", "demo", "--metrics", ":9090"], "metrics"),
        (["cloud", "/no/such/model"], "/no/such/model"),
        (["cloud", "demo", "--listen", "7070"], "7070"),
        (["cloud", "demo", "--listen", "127.0.0.1:70000"], "70000"),
        (["cloud", "demo", "--listen", "0.0.0.0:7070"], "--tokens"),
        (["cloud", "demo", "--listen", ":7070"], "--insecure"),
        (["cloud", "demo", "--tls-cert", "a.pem"], "--tls-key"),
        (["cloud", "demo", "--client-ca", "a.pem"], "--tls-cert"),
        (["cloud", "demo", "--tokens", "/no/such"], "/no/such"),
        (["cloud", "demo", "--kv-budget", "lots"], "lots"),
        (["cloud", "demo", "--max-context", "1"], "max-context"),
        (["cloud", "demo", "--max-context", "1.5"], "1.5"),
        (["cloud", "demo", "--max-sessions", "0"], "--max-sessions"),
        (["cloud", "demo", "--max-rate", "0"], "--max-rate"),
        (["cloud", "demo", "--grace", "-1"], "grace"),
        (["cloud", "demo", "--metrics", "9090"], "9090"),
        (["cloud", "demo", "--log-format", "xml"], "xml"),
        (["cloud"], "MODEL"),
    ],
)
def test_bad_options_are_named_with_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], no_models: None
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert named in err
    assert "Traceback" not in err
    assert err.startswith("outrider: ")


def test_a_token_does_not_cross_a_network_unencrypted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("a-token-that-is-long-enough")
    arguments = ["generate", "hi", "--cloud", "grpc://cloud.example:7070", "--token-file", str(tmp_path / "token")]
    assert run(*arguments) == 2
    assert "unencrypted" in capsys.readouterr().err


def test_a_cloud_that_cannot_be_reached_is_named_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], no_models: None
) -> None:
    with ReservedPort() as port:  # refused at once
        assert run("generate", "--prompt-ids", "5", "--cloud", f"grpc://127.0.0.1:{port}", "--patience", "0.3") == 1
    err = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be reached" in err
    assert "refused" in err.lower(), "the reason is not named"


def test_a_name_that_does_not_resolve_is_said_to_be_one(capsys: pytest.CaptureFixture[str], no_models: None) -> None:
    assert run("generate", "--prompt-ids", "5", "--cloud", "grpc://no.such.host.invalid:7070", "--patience", "0.3") == 1
    assert "lost at once" not in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--tls"], ["--token-file", "x"]])
def test_the_demo_refuses_what_its_own_cloud_does_not_have(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", *option) == 2
    assert option[0] in capsys.readouterr().err


def test_a_recording_without_a_drafter_is_refused_in_true_words(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = str(BUNDLED / "clips" / "en-1.ogg")
    assert run("caption", clip, "--edge", "none", "--cloud", f"grpc://{address}") == 2
    assert "edge model" in capsys.readouterr().err


def test_a_cloud_that_is_not_there_from_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with ReservedPort() as port:
        far = ["--cloud", f"grpc://127.0.0.1:{port}", "--patience", "0.2"]
        for options in (["--on-cloud-loss", "edge-only"], ["--gate", "entropy:1.5"]):
            assert run(*GENERATE, "12", *far, *options) == 0
            result = json.loads(capsys.readouterr().out)
            assert result["guarantee"] == "edge-only"
            assert result["stats"]["cloud_lost"]
            assert result["stats"]["cloud_tokens"] == 0


@pytest.mark.parametrize("options", [["--kv-budget", "1kB"], ["--listen", "192.0.2.1:7070", "--insecure"]])
def test_a_service_that_cannot_start_says_why(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cloud", "demo", *options) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "budget" in err or "192.0.2.1" in err


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    with cloud_process("demo") as running:
        yield running


def test_the_same_output_over_the_network_and_what_it_cost(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for options in (["--cloud", "local:demo"], *(["--cloud", f"grpc://{address}", *more] for more in MORE)):
        assert run(*GENERATE, "12", *options) == 0
        results.append(json.loads(capsys.readouterr().out))
    here, *there = results
    assert here["ledger"] == {"up": {}, "down": {}}
    for result in there:
        assert result["token_ids"] == here["token_ids"]
        assert result["guarantee"] == "exact"
        assert sum(result["ledger"]["up"].values()) == result["stats"]["bytes_up"] > 0
        assert sum(result["ledger"]["down"].values()) == result["stats"]["bytes_down"] > 0


MORE = ([], ["--driver", "pipelined"], ["--net", "rtt=5ms,bw=1Mbit"], ["--edge", "none"], ["--on-cloud-loss", "wait"])


@contextmanager
def giving_out(address: str, after: int) -> Iterator[str]:
    """The cloud behind a link that is blocked for good once so many bytes went up."""
    host, _, port = address.rpartition(":")
    over = threading.Event()
    with LinkThread(host, int(port), Conditions(rtt=0.02)) as link:

        def watch() -> None:
            while not over.is_set():
                if link.up > after:
                    link.block(True)
                time.sleep(0.005)  # the pause of a watch of the link's own count of bytes

        watching = threading.Thread(target=watch)
        watching.start()
        yield f"grpc://127.0.0.1:{link.port}"
        over.set()
        watching.join()


def test_a_cloud_lost_on_the_way(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What comes of it is what was asked for."""
    long = [*GENERATE, "200", "--patience", "0.2", "--deadline", "1"]
    with giving_out(address, after=900) as far:
        assert run(*long, "--cloud", far) == 1
    out, err = capsys.readouterr()
    assert not out
    assert "cannot be reached" in err
    with giving_out(address, after=900) as far:
        assert run(*long, "--cloud", far, "--on-cloud-loss", "edge-only") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["guarantee"] == "edge-only"
    assert result["stats"]["cloud_lost"]
    assert result["stats"]["cloud_tokens"] > 0
    assert len(result["token_ids"]) == 200
    assert any("cloud was lost" in warning for warning in result["warnings"])


def test_a_secured_service_lets_in_who_shows_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path)
    issued, edge = authority.server("cloud"), authority.client("edge")
    (tmp_path / "tokens").write_text("reader a-token-that-is-long-enough\n")
    (tmp_path / "tokens").chmod(0o600)
    (tmp_path / "token").write_text("a-token-that-is-long-enough\n")
    (tmp_path / "other").write_text("another-token-that-nobody-knows\n")
    tls = ("--tls-cert", str(issued.cert), "--tls-key", str(issued.key), "--client-ca", str(authority.ca))
    with cloud_process("demo", *tls, "--tokens", str(tmp_path / "tokens")) as address:
        port = address.rpartition(":")[2]
        here = [*GENERATE, "12", "--cloud", f"grpc://localhost:{port}", "--patience", "0.5"]
        mine = ["--ca", str(authority.ca), "--cert", str(edge.cert), "--key", str(edge.key)]
        assert run(*here, *mine, "--token-file", str(tmp_path / "token")) == 0
        assert json.loads(capsys.readouterr().out)["guarantee"] == "exact"
        for options, named in (
            ([*mine, "--token-file", str(tmp_path / "other")], "token"),
            (mine, "token"),
            (["--ca", str(authority.ca), "--token-file", str(tmp_path / "token")], "certificate"),
            (["--tls", "--token-file", str(tmp_path / "token")], "certificate"),
        ):
            assert run(*here, *options) == 1
            assert named in capsys.readouterr().err.lower()


STARTS = """
import sys
from outrider.cli.subprocess_cloud import cloud_process
with cloud_process("demo") as address:
    print(address, flush=True)
    sys.stdin.read()
"""


def test_a_cloud_of_our_own_ends_with_the_process_that_started_it_even_if_that_is_killed() -> None:
    with started([sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        host, _, port = starter.stdout.readline().strip().rpartition(":")
        assert listens(host, int(port))
        starter.kill()
    wait_until(lambda: not listens(host, int(port)))


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_cloud_only_over_the_network_needs_no_edge_model(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cloud's description and tokenizer suffice. A text is refused, as its checkpoint is for recordings alone."""
    for edge in ("none", "lookup"):
        assert run("generate", "hi", "--edge", edge, "--cloud", f"grpc://{address}") == 2
        assert "only writes captions of recordings" in capsys.readouterr().err
        assert run("generate", "--prompt-ids", "5,6", "--edge", edge, "--cloud", f"grpc://{address}") == 0


def test_what_the_package_says_of_the_cloud_is_exported() -> None:
    assert issubclass(outrider.CloudLost, outrider.CloudError)
    assert issubclass(outrider.CloudRefused, outrider.CloudError)


@pytest.mark.network
@pytest.mark.parametrize("command", [("demo",), ("edge", "--listen", "127.0.0.1:0")])
def test_what_is_told_to_end_leaves_no_cloud_behind(command: tuple[str, ...]) -> None:
    """Both start a cloud in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        started = psutil.Process(process.pid)
        wait_until(lambda: started.children() or process.poll() is not None)
        children = started.children()
        process.terminate()
        process.wait(HANG_S)
    finally:
        process.kill()
    gone, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive
    assert len(gone) == 1
