"""SGLang, played after its documented exchanges. SGLang itself was never run here: it needs a GPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.fake_llm_server import (
    Bad,
    Json,
    Model,
    PrefixCache,
    Server,
    best,
    check,
    exactly,
    flag,
    ids,
    text,
    whole,
)


def _biases(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdigit() and isinstance(bias, float) for key, bias in value.items())


GENERATE = {
    "input_ids": ids,
    "sampling_params": lambda value: isinstance(value, dict),
    "return_logprob": flag,
    "logprob_start_len": whole(-1, 2**31),
    "top_logprobs_num": whole(0, 2**31),
    "return_text_in_logprobs": flag,
}
SAMPLING = {"temperature": exactly(0.0, 0), "max_new_tokens": exactly(1), "logit_bias": _biases}


class SglangServer(Server):
    """One `sglang.launch_server`. length: --context-length. logits: a server whose rows are none of SGLang's."""

    scheme = "sglang"

    def __init__(
        self, model: Model, *, name: str = "/models/tiny", length: int = 512, logits: bool = False, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.name, self.length, self.logits = name, length, logits
        self.paths = {
            ("GET", "/get_model_info"): lambda _: {"model_path": self.name, "is_generation": True},
            ("GET", "/get_server_info"): lambda _: {"context_length": self.length, "version": "0.5.23"},
            ("POST", "/generate"): self._generate,
            ("POST", "/v1/detokenize"): self._detokenize,
        }
        self.forget()

    def forget(self) -> None:
        self.cache = PrefixCache()

    def error(self, status: int, message: str) -> Json:
        return {"error": {"message": message}}

    def _detokenize(self, body: Json) -> Json:
        check(body, {"model": text, "tokens": ids, "skip_special_tokens": flag}, "detokenize", ("tokens",))
        tokens, hidden = body["tokens"], body.get("skip_special_tokens", True)
        return {"text": self.model.tokenizer.decode(tokens, skip_special_tokens=hidden)}

    def _generate(self, body: Json) -> Json:
        check(body, GENERATE, "generate", ("input_ids", "sampling_params"))
        check(body["sampling_params"], SAMPLING, "sampling_params", ("temperature", "max_new_tokens"))
        tokens = body["input_ids"]
        if len(tokens) >= self.length:
            raise Bad(
                f"The input ({len(tokens)} tokens) is longer than the model's context length ({self.length} tokens)."
            )
        rows = self.model.read(tokens)
        start = body.get("logprob_start_len", -1)
        start = len(tokens) - 1 if start < 0 or not body.get("return_logprob") else start
        if start >= len(tokens):
            raise Bad(f"{start=} is higher than the number of input tokens {len(tokens)}")
        cached = min(self.cache.take(None, tokens), start)  # from there on, rows are wanted
        self.read += len(tokens) - cached
        row = rows[-1].clone()
        for token, bias in body["sampling_params"].get("logit_bias", {}).items():
            row[int(token)] += bias
        token = int(row.argmax())
        end = {"type": "stop", "matched": token} if token in self.model.eos else {"type": "length", "length": 1}
        meta = {"id": "1", "finish_reason": end, "prompt_tokens": len(tokens), "completion_tokens": 1}
        if body.get("return_logprob"):
            told = rows if self.logits else torch.log_softmax(rows, -1)
            meta |= self._rows(tokens, start, told, token, body.get("top_logprobs_num", 0))
        return {"text": self.model.decode([token]), "output_ids": [token], "meta_info": meta}

    def _rows(self, tokens: list[int], start: int, rows: torch.Tensor, token: int, count: int) -> Json:
        """The first of the tokens from `start` on has no row here: its place is before them."""
        behind = range(start + 1, len(tokens))
        return {
            "input_token_logprobs": [
                [None, tokens[start], None],
                *([float(rows[n - 1][tokens[n]]), tokens[n], None] for n in behind),
            ],
            "input_top_logprobs": [None, *(_top(rows[n - 1], count) for n in behind)],
            "output_token_logprobs": [[float(rows[-1][token]), token, None]],
            "output_top_logprobs": [_top(rows[-1], count)],
        }


def _top(row: torch.Tensor, count: int) -> list[Any]:
    return [[value, token, None] for token, value in best(row, count)]
