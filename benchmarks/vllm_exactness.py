"""The bundled pair with its larger model on a vLLM server: is the output the server's own greedy output?

Starts `vllm serve` with the text part of the bundled cloud model in float32. The outputs for 20 random prompts
are compared token by token for each k, beyond the end token. A difference may begin at a reported near tie only.
Prints the warnings of the verifier and one JSON line, with the request mode that was found.

    python -m benchmarks.vllm_exactness [--k 1 5] [--tokens 32] [-- OPTIONS]

OPTIONS go to `vllm serve`. For model runner V2 set VLLM_USE_V2_MODEL_RUNNER=1.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.vllm_server import Server
from outrider import SpeculativeDecoder, load_engine
from outrider.engines.load import BUNDLED
from outrider.verifiers.llm_server.verifier import LlmServerVerifier
from outrider.verifiers.llm_server.vllm import VllmBackend

PROMPTS = 20
OPTIONS = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager")


def write_text_model(folder: Path) -> Path:
    """Write the text part of the bundled cloud model as a Qwen2 model."""
    from safetensors.torch import load_file, save_file

    source = BUNDLED / "cloud"
    folder.mkdir(parents=True)
    for name in ("generation_config.json", "tokenizer.json"):
        shutil.copy(source / name, folder)
    text = json.loads((source / "config.json").read_text(encoding="utf-8"))["text_config"]
    rope = {"rope_theta": text["rope_parameters"]["rope_theta"], "rope_parameters": None}
    config = {**text, **rope, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    weights = load_file(source / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name.startswith("model.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def greedy(port: int, ids: list[int], tokens: int) -> list[int]:
    """The server's own output."""
    body = {"model": "model", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def compare(port: int, ks: list[int], tokens: int) -> dict[str, Any]:
    edge, rng = load_engine("demo:edge", dtype="float32"), random.Random(0)
    found: dict[str, Any] = {"equal": 0, "near_tie": 0, "unexplained": 0, "generated": 0, "rounds": 0}
    with LlmServerVerifier(VllmBackend(), [("127.0.0.1", port)], deadline=300.0) as verifier:
        for n in range(PROMPTS):
            ids = rng.choices(range(270, edge.vocab_size), k=8 + 3 * n)
            expected = greedy(port, ids, tokens)
            for k in ks:
                out = SpeculativeDecoder(edge, verifier, k=k).generate(ids, max_new_tokens=tokens, ignore_eos=True)
                found["generated"] += len(out.token_ids)
                found["rounds"] += out.stats.rounds
                found[_outcome(out, expected)] += 1
        capabilities = verifier.replicas[0].capabilities
    assert capabilities is not None
    kept = ("mode", "top", "normalised", "noise", "media_refusal")
    return {**found, **{name: getattr(capabilities, name) for name in kept}}


def _outcome(out: Any, expected: list[int]) -> str:
    if out.token_ids == expected:
        return "equal"
    pairs = zip(out.token_ids, expected, strict=False)
    parted = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(out.token_ids), len(expected)))
    return "near_tie" if parted in out.near_ties else "unexplained"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--label", default="")
    parser.add_argument("--python", default=sys.executable, help="of the environment that has vLLM")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "vllm_exactness.log")
    parser.add_argument("server", nargs="*", help="options of vllm serve, after --")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        model = write_text_model(Path(folder) / "model")
        with Server(model, [*OPTIONS, *options.server], options.log, python=options.python) as server:
            found = compare(server.port, options.k, options.tokens)
    print(json.dumps({"benchmark": "vllm_exactness", "label": options.label, "k": options.k, **found}), flush=True)


if __name__ == "__main__":
    main()
