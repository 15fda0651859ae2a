"""Generation end to end on a GPU at a chosen acceptance rate, against transformers and against no drafts at all.

Random models of the sizes of Qwen2.5 0.5B and 7B in bfloat16, on one card. Both sides of the comparison get the same
oracle: the drafter does its work, and its tokens are replaced by the target's own, wrong at rate 1 − alpha. Ours runs
in exact mode, greedy; all outputs are compared. transformers' assisted generation is run with several numbers of
tokens, a constant schedule and no confidence stop, and its best counts. Runs are interleaved, medians are printed, and
one JSON line comes last.

    python -m benchmarks.gpu_generate [--contexts 200 2000] [--alpha 0.8] [--k 5] [--tokens 128]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from benchmarks.gpu_engine import CONSTRAINED
from benchmarks.random_models import counting, random_model
from benchmarks.synthetic_drafter import SyntheticDrafter, corrupt_tokens
from outrider.api import SpeculativeDecoder, local
from outrider.edge.drafter import Drafter, Proposer
from outrider.edge.generation import Generation
from outrider.engines.prefix_cache import unique_salt
from outrider.engines.torch.engine import TorchEngine

ASSISTANT_TOKENS = (3, 4, 5, 6)
PEER_RUNS, PEER_TOKENS = 2, 96  # transformers takes seconds for each run


class WithOracle(SpeculativeDecoder):
    """A decoder whose drafts come from an oracle at a chosen acceptance rate."""

    output: list[int]
    alpha: float
    seed: int

    def _start(self, *arguments: Any, **options: Any) -> Generation:
        generation = super()._start(*arguments, **options)
        open_drafter = generation.open_drafter

        def open_synthetic_drafter() -> Proposer:
            drafter = open_drafter()
            assert isinstance(drafter, Drafter)
            return SyntheticDrafter(drafter, len(generation.prompt.ids), self.output, self.alpha, self.seed)

        generation.open_drafter = open_synthetic_drafter  # type: ignore[method-assign]
        return generation


def timed(run: Callable[[], list[int]]) -> tuple[float, list[int]]:
    """Milliseconds per token, and the tokens."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = run()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / len(out), out


@contextmanager
def peers_attention(*models: Any) -> Iterator[None]:
    """transformers' own attention, for transformers' own loops."""
    ours = [model.config._attn_implementation for model in models]
    for model in models:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        for model, name in zip(models, ours, strict=True):
            model.set_attn_implementation(name)


class TransformersBaseline:
    """transformers' `generate`, plain and assisted by the same oracle."""

    def __init__(self, target: Any, assistant: Any, prompt: list[int], output: list[int], alpha: float) -> None:
        self.target, self.assistant, self.prompt = target, assistant, prompt
        self._output, self._alpha = output, alpha
        self.reseed(0)
        for config in (target.generation_config, assistant.generation_config):
            config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0

    def reseed(self, seed: int) -> None:
        """Draw the oracle's errors anew, the same as ours gets."""
        self._tokens = corrupt_tokens(self._output, self._alpha, seed)

    def plain(self, tokens: int) -> list[int]:
        return self._generate(tokens)

    def assisted(self, tokens: int, count: int) -> list[int]:
        self.assistant.generation_config.num_assistant_tokens = count
        hook = self.assistant.register_forward_hook(self._replace, with_kwargs=True)
        try:
            return self._generate(tokens, assistant_model=self.assistant)
        finally:
            hook.remove()

    def _replace(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        at = cache.get_seq_length() - len(self.prompt)
        if 0 <= at < len(self._tokens):
            output.logits[0, -1, self._tokens[at]] = 1e4

    def _generate(self, tokens: int, **more: Any) -> list[int]:
        ids = torch.tensor([self.prompt], device="cuda")
        mask = torch.ones_like(ids)
        out = self.target.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **more)
        return out[0, len(self.prompt) :].tolist()


def decoders(draft: TorchEngine, target: TorchEngine, args: argparse.Namespace) -> tuple[Any, Any]:
    ours = WithOracle(draft, local(target), k=args.k)
    ours.alpha, ours.seed = args.alpha, 0
    return ours, SpeculativeDecoder(None, local(target))


def measure(draft: TorchEngine, target: TorchEngine, context: int, args: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(context)
    prompt = torch.randint(10, 100_000, (context,), generator=generator).tolist()
    ours, plain = decoders(draft, target, args)
    longest = args.tokens + 16
    ours.output = plain.generate(prompt, max_new_tokens=longest, ignore_eos=True).token_ids
    peer = TransformersBaseline(target.model, draft.model, prompt, ours.output, args.alpha)
    settings = {"max_new_tokens": args.tokens, "ignore_eos": True}
    acceptance: list[float] = []

    def speculative(**more: Any) -> list[int]:
        result = ours.generate(prompt, cache_salt=unique_salt(), **settings, **more)
        acceptance.append(result.stats.acceptance_rate)
        return result.token_ids

    ways: dict[str, Callable[[], list[int]]] = {
        "speculative": speculative,
        "plain": lambda: plain.generate(prompt, cache_salt=unique_salt(), **settings).token_ids,
        "speculative, constrained": lambda: speculative(**CONSTRAINED),
        "plain, constrained": lambda: (
            plain.generate(prompt, cache_salt=unique_salt(), **settings, **CONSTRAINED).token_ids
        ),
    }
    length = 8  # at first
    peers: dict[str, Callable[[], list[int]]] = {"transformers plain": lambda: peer.plain(length)}
    for count in ASSISTANT_TOKENS:
        peers[f"transformers assisted, {count}"] = lambda count=count: peer.assisted(length, count)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in (*ways, *peers)}
    for run in range(args.repeats + 1):  # the first one warms up
        ours.seed = run
        peer.reseed(run)
        speculative()  # transformers' runs leave the card's clock low and our memory cold
        for name, way in ways.items():
            spent, out = timed(way)
            assert out == ours.output[: len(out)], f"{name}: another output"
            times[name] += [spent] if run else []
        if run <= args.peer_runs:
            with peers_attention(target.model, draft.model):
                for name, way in peers.items():
                    spent, out = timed(way)
                    assert out == ours.output[: len(out)], f"{name}: another output"
                    times[name] += [spent] if run else []
            length = PEER_TOKENS
    found = {name: round(statistics.median(values), 3) for name, values in times.items() if values}
    assisted = [value for name, value in found.items() if "assisted" in name]
    ratios = {
        "acceptance": round(statistics.mean(acceptance), 3),
        "against best assisted": round(min(assisted) / found["speculative"], 2) if assisted else None,
        "against own plain": round(found["plain"] / found["speculative"], 2),
        "constrained against not": round(found["speculative, constrained"] / found["speculative"], 3),
    }
    return {"ms per token": found, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-runs", type=int, default=PEER_RUNS, help="-1: without transformers")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    draft = TorchEngine(random_model("0.5B"), name="0.5B")
    target = TorchEngine(counting(random_model("7B")), name="7B")
    results = {}
    for context in args.contexts:
        results[context] = found = measure(draft, target, context, args)
        print(f"context {context}")
        for name, value in found["ms per token"].items():
            print(f"    {name:32s} {value:8.3f} ms per token")
        print(
            "    " + ", ".join(f"{name} {value}" for name, value in found.items() if name != "ms per token"), flush=True
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    card = torch.cuda.get_device_name()
    print(json.dumps({"benchmark": "gpu_generate", **vars(args), "card": card, **versions, "results": results}))


if __name__ == "__main__":
    main()
