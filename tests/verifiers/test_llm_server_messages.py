"""What somebody is told of other people's servers: in one line, once, with what to change."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider import Audio, SpeculativeDecoder, connect
from outrider.errors import CloudLost, CloudRefused, SettingsError
from outrider.verifiers.llm_server import replicas
from tests.support.fake_llm_server import (
    Fault,
    Model,
    connect_servers,
    draft_engine,
    reference_result,
    target_engine,
)
from tests.support.fake_sglang import SglangServer
from tests.support.fake_vllm import VllmServer
from tests.support.tiny_models import clip

pytestmark = pytest.mark.network

PROMPT = [20, 30, 40, 50]
GENERATE = "/inference/v1/generate"

connect_briefly = partial(connect_servers, patience=0.3)


def own_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of ours."""
    ours = [record for record in caplog.records if record.name.startswith("outrider")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def generate_tokens(verifier: Any, prompt: Any = PROMPT, **options: Any) -> list[int]:
    return (
        SpeculativeDecoder(draft_engine(), verifier, k=3)
        .generate(prompt, **{"max_new_tokens": 12, **options})
        .token_ids
    )


# Who is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
def test_without_an_edge_model_one_is_asked_for(kind: Any) -> None:
    with (
        kind(Model(target_engine())) as server,
        connect_briefly(server) as verifier,
        pytest.raises(SettingsError) as caught,
    ):
        SpeculativeDecoder(None, verifier)
    assert f"--edge none is not possible with {server.scheme}" in str(caught.value)
    assert "give an edge model" in str(caught.value)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("status", [404, 405, 501])
def test_another_server_at_the_port(kind: str, status: int) -> None:
    with VllmServer(Model(target_engine())) as server, connect(f"{kind}://127.0.0.1:{server.port}") as verifier:
        server.faults.append(Fault(status=status, raw=b"<html>", times=99))
        with pytest.raises(CloudRefused) as caught:
            verifier.probe()
    product = {"vllm": "vLLM", "sglang": "SGLang"}[kind]
    assert f"127.0.0.1:{server.port}: the server does not offer {product}'s API" in str(caught.value)
    assert str(caught.value).count(f"HTTP {status}") == 1


def test_a_status_without_a_reason_is_named_once() -> None:
    with VllmServer(Model(target_engine())) as server, connect_briefly(server) as verifier:
        server.faults.append(Fault(status=400, raw=b"<html>", times=99))
        with pytest.raises(CloudRefused, match=rf"127\.0\.0\.1:{server.port}: HTTP 400$"):
            verifier.probe()


@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
def test_a_wrong_token_and_none_are_told_apart(kind: Any) -> None:
    with kind(Model(target_engine()), key="secret") as server:
        for given, said_so in (({}, "it may want a token"), ({"token": "wrong"}, "the token given is not accepted")):
            with (
                connect_briefly(server, **given) as verifier,
                pytest.raises(CloudRefused, match=f"Unauthorized; {said_so}$"),
            ):
                verifier.probe()


def test_who_may_not_do_it_is_told_so_and_what_is_closed_has_nothing_to_do_with_tokens() -> None:
    with VllmServer(Model(target_engine())) as server:
        for given, said_so in (({}, "it may want a token"), ({"token": "x"}, "the token given may not be enough")):
            with connect_briefly(server, **given) as verifier:
                server.faults.append(Fault("/v1/models", 403, "not you."))
                with pytest.raises(CloudRefused, match=f"refused: not you; {said_so}$"):
                    verifier.probe()
        with connect_briefly(server) as verifier:
            generate_tokens(verifier)
            server.scale_out = 403
            with pytest.raises(CloudRefused, match="Scale-out") as caught:
                generate_tokens(verifier)
            assert "token" not in str(caught.value)


def test_an_address_is_named_once() -> None:
    with VllmServer(Model(target_engine())) as server:
        pass
    with connect_briefly(server) as verifier, pytest.raises(CloudLost) as caught:
        verifier.probe()
    assert str(caught.value).startswith(f"{server.address} cannot be reached: ")
    assert str(caught.value).count(str(server.port)) == 1
    with server, connect_briefly(server) as verifier:
        server.faults.append(Fault(status=503, message="loading", times=99))
        with pytest.raises(CloudLost, match=r"cannot be reached: loading \(HTTP 503\)") as caught:
            verifier.probe()
    assert str(caught.value).count(str(server.port)) == 1


@contextmanager
def http1_only_server() -> Iterator[int]:
    """The port of a server that answers whatever comes as a plain HTTP server answers what is no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_tls_with_a_server_that_has_none() -> None:
    started = time.monotonic()
    with (
        http1_only_server() as port,
        connect(f"vllm://127.0.0.1:{port}", tls=True, patience=1000.0) as verifier,
        pytest.raises(CloudRefused, match="it does not speak TLS"),
    ):
        verifier.probe()
    assert time.monotonic() - started < 500.0, "nothing is tried again"


# Replicas -------------------------------------------------------------------------------------------------------


def test_a_lost_replica_is_told_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def elapse() -> None:
        clock.now += 2 * replicas.AVOID_SECONDS

    with (
        VllmServer(Model(target_engine())) as one,
        VllmServer(Model(target_engine())) as two,
        connect_briefly(one, two) as verifier,
    ):
        for n in range(12):
            generate_tokens(verifier, [20 + n])
        assert one.sessions
        assert own_warnings(caplog) == []
        one.stop()
        for n in range(12):
            assert generate_tokens(verifier, [20 + n]) == reference_result([20 + n], k=3).token_ids
            elapse()  # it is tried again
        (line,) = own_warnings(caplog)
        assert line.startswith(f"replica {one.address} does not answer (")
        assert line.endswith(f"); its sessions move to {two.address}")
        assert line.count(str(one.port)) == 1
        one.start()
        elapse()
        for n in range(12):
            generate_tokens(verifier, [20 + n])
        assert own_warnings(caplog)[1:] == [f"replica {one.address} is back in use"]


def test_a_replica_that_is_not_there_at_the_start_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with VllmServer(Model(target_engine())) as gone:
        pass
    with VllmServer(Model(target_engine())) as there, connect_briefly(gone, there) as verifier:
        for n in range(12):
            generate_tokens(verifier, [20 + n])
    (line,) = own_warnings(caplog)
    assert line.startswith(f"replica {gone.address} does not answer (")


def test_where_all_are_lost_nobody_is_moved_to(caplog: pytest.LogCaptureFixture) -> None:
    with VllmServer(Model(target_engine())) as one, VllmServer(Model(target_engine())) as two:
        pass
    with connect_briefly(one, two) as verifier, pytest.raises(CloudLost):
        verifier.probe()
    first, second = own_warnings(caplog)
    assert "; its sessions move to vllm://" in first
    assert second.endswith("; none is left")


def test_a_server_alone_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with VllmServer(Model(target_engine())) as server, connect_briefly(server, patience=3.0) as verifier:
        server.faults.append(Fault(GENERATE, cut=True, skip=4))
        assert generate_tokens(verifier) == reference_result(PROMPT, k=3).token_ids
    assert own_warnings(caplog) == []


# What a setting or an option of the server costs ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale_out", "reason"),
    [
        (403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them"),
        (404, "this version of vllm has no /inference/v1/generate"),
    ],
)
def test_the_slow_way_is_told_once_with_its_remedy(
    caplog: pytest.LogCaptureFixture, scale_out: int, reason: str
) -> None:
    with VllmServer(Model(target_engine()), scale_out=scale_out) as server, connect_briefly(server) as verifier:
        generate_tokens(verifier)
        generate_tokens(verifier)
    line = f"{server.address} reads each block as k+1 prompts, at some k+1 times the work: "
    assert own_warnings(caplog) == [f"{line}{reason}"]


def test_the_slow_way_for_another_reason_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with VllmServer(Model(target_engine())) as server, connect_briefly(server) as verifier:
        server.faults.append(Fault(GENERATE, 400, "no rows here", times=99))
        generate_tokens(verifier)
    (line,) = own_warnings(caplog)
    assert line.endswith("as one sequence it could not be verified (no rows here (HTTP 400))")


def test_a_recording_for_which_there_is_no_slow_way_is_refused_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = Audio(clip(1.3) * np.float32(1.0), instruction="hi")
    with VllmServer(Model(target_engine("omni")), scale_out=403) as server, connect_briefly(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine("omni"), verifier)
        with pytest.raises(SettingsError, match=r"cannot verify a recording: .*with --enable-scale-out to enable them"):
            decoder.generate(heard, max_new_tokens=4)
    assert own_warnings(caplog) == []


@pytest.mark.parametrize("options", [{}, {"runner": "v1", "garbage": "nan"}], ids=str)
def test_a_recording_that_0_24_would_ignore_is_never_sent(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    heard = Audio(clip(1.3) * np.float32(1.0), instruction="hi")
    with VllmServer(Model(target_engine("omni")), old=True, **options) as server, connect_briefly(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine("omni"), verifier)
        with pytest.raises(SettingsError, match=r"do not count the tokens.*vllm 0\.24 is such a version"):
            decoder.generate(heard, max_new_tokens=4)
        assert not any("content_parts" in body for _, body in server.requests)
    assert own_warnings(caplog) == []


def test_nan_in_cached_rows_of_0_24_is_told_without_a_word_on_recordings(caplog: pytest.LogCaptureFixture) -> None:
    server = VllmServer(Model(target_engine()), old=True, runner="v1", garbage="nan")
    with server, connect_briefly(server) as verifier:
        assert generate_tokens(verifier) == reference_result(PROMPT, k=3).token_ids
    (line,) = own_warnings(caplog)
    assert "reads each block as k+1 prompts; start vllm with MALLOC_PERTURB_=255" in line
    assert line.endswith("or VLLM_USE_V2_MODEL_RUNNER=1")


def test_the_whole_vocabulary_needs_a_later_version_than_0_24() -> None:
    server = VllmServer(Model(target_engine()), old=True, max_logprobs=-1)
    with server, connect_briefly(server) as verifier:
        with pytest.raises(SettingsError, match="use a later vllm with --max-logprobs -1"):
            generate_tokens(verifier, temperature=1.0, seed=1)
        with pytest.raises(SettingsError, match="start vllm with --max-logprobs 301"):
            generate_tokens(verifier, temperature=1.0, seed=1, top_k=300)


@pytest.mark.parametrize("which", [{"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_draw_that_may_not_be_settled_is_told_before(caplog: pytest.LogCaptureFixture, which: dict[str, Any]) -> None:
    options = {"temperature": 0.3, "seed": 1, **which}
    (name,) = which
    with VllmServer(Model(target_engine())) as server, connect_briefly(server) as verifier:
        generate_tokens(verifier, temperature=0.3, seed=1, top_k=5, **which)
        assert own_warnings(caplog) == []
        generate_tokens(verifier, **options)
        generate_tokens(verifier, **options)
        (line,) = own_warnings(caplog)
        assert line.startswith(f"{name} may not be determined by the 20 entries of a row that {server.address} sends")
        assert line.endswith("add top_k (up to 19), or start vllm with --max-logprobs -1")
    caplog.clear()
    with VllmServer(Model(target_engine()), max_logprobs=-1) as server, connect_briefly(server) as verifier:
        generate_tokens(verifier, **options)
    assert own_warnings(caplog) == []
