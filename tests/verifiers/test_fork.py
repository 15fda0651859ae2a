"""A connection that was open when its process forked: refused by name in the child, and still whole in the parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.cloud_server import serving
from tests.support.fakes import HashRows, ScriptedEngine
from tests.support.processes import HANG_S

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from outrider import StateError, connect
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.verifiers.base import SessionParams

def refusal(work):
    try:
        work()
    except StateError as error:
        return str(error)
    return "it went on"

verifier, there = connect(sys.argv[1]), sys.argv[2] == "there"
works = {"probe": verifier.probe}
if there:
    session = verifier.open(Prompt((3, 1, 4)), SessionParams(GenerationSettings(), "exact", 32))
    verifier.verify(session, Verify(1, 3, (), ()))
    works = {
        "verify": lambda: verifier.verify(session, Verify(2, 4, (), ())),
        "generate": lambda: next(verifier.generate(session)),
        "ledger": lambda: verifier.byte_counts(session),
    }
sys.stdout.flush()
child = os.fork()
if child == 0:
    print(json.dumps({name: refusal(work) for name, work in works.items()}), flush=True)
    if there:
        verifier.close(session)
    verifier.disconnect()
    sys.exit()  # in order: what runs at exit must leave the parent's files alone
os.waitpid(child, 0)
if there:
    session = verifier.open(Prompt((3, 1, 4)), SessionParams(GenerationSettings(), "exact", 32))
    verifier.verify(session, Verify(1, 3, (), ()))
    print(json.dumps({"verified": True}), flush=True)
verifier.disconnect()
"""


def forked(target: str, how: str) -> list[dict[str, object]]:
    command = [sys.executable, "-c", SCRIPT, target, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_open_session_is_refused_in_the_child_and_goes_on_in_the_parent() -> None:
    with serving(ScriptedEngine(HashRows(1, 32), 32)) as served:
        child, parent = forked(f"grpc://{served.address}", "there")
    assert set(child) == {"verify", "generate", "ledger"}
    for message in child.values():
        assert "before a fork" in str(message)
        assert served.address in str(message)
    assert parent == {"verified": True}


@pytest.mark.parametrize("target", ["grpc://127.0.0.1:1", "vllm://127.0.0.1:1,127.0.0.1:2", "sglang://127.0.0.1:1"])
def test_every_kind_of_connection_is_refused_in_the_child(target: str) -> None:
    (child,) = forked(target, "away")
    assert "before a fork" in str(child["probe"])
    assert target in str(child["probe"])
