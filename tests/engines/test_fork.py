"""Models in a forked child: refused by name, where OpenMP and held locks would make them hang for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SCRIPT = """
import json, os, signal, sys, threading
from outrider import OutriderError, SpeculativeDecoder, load_engine, local
from outrider.engines.locking import LOAD_LOCK, get_lock
from outrider.engines.torch.engine import TorchEngine
from tests.support.tiny_text_models import model

prompt = list(range(2, 96))
made = model("qwen2")
engine = TorchEngine(made, name="qwen2")
demo = load_engine("demo:edge")
decoder = SpeculativeDecoder(demo, None)
paired = SpeculativeDecoder(engine, local(engine))
paired.generate(prompt, max_new_tokens=2)


def outcome(work):
    try:
        work()
    except OutriderError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


works = {
    "ids": lambda: paired.generate(prompt, max_new_tokens=2),
    "text": lambda: decoder.generate("Hello", max_new_tokens=2),
    "stream": lambda: list(paired.stream(prompt, max_new_tokens=2)),
    "wrap": lambda: TorchEngine(made),
    "wrap by name": lambda: load_engine(model("llama")),
    "load": lambda: load_engine("demo:edge"),
}
held, over = threading.Event(), threading.Event()


def hold():  # as another thread inside a forward, a tokenizer and a load does
    with engine.lock, demo.lock, get_lock(demo.tokenizer), LOAD_LOCK:
        held.set()
        over.wait()


threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(120)
    print(json.dumps({name: outcome(work) for name, work in works.items()}), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
over.set()
works["ids"]()
print(json.dumps(status))
"""


def test_a_forked_child_is_refused_before_any_lock_and_the_parent_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found, status = map(json.loads, done.stdout.splitlines())
    assert status == 0, "the child ended by itself, not by the alarm"
    for name, said in found.items():
        assert said.startswith("StateError: process "), name
        assert 'multiprocessing.get_context("spawn")' in said, name


def test_a_child_of_a_process_without_models_loads_its_own() -> None:
    script = """
import os, signal
import outrider
child = os.fork()
if child == 0:
    signal.alarm(120)
    result = outrider.SpeculativeDecoder(outrider.load_engine("demo:edge"), None).generate("Hello", max_new_tokens=2)
    print(len(result.token_ids), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "2", done.stderr
