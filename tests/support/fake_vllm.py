"""vLLM, played: the endpoints, fields, limits and error texts of 0.32 and 0.24, and both runners' prefix caches."""

from __future__ import annotations

import base64
import io
import random
from typing import Any, Literal

import numpy as np
import soundfile
import torch

from tests.support.fake_llm_server import (
    Bad,
    Json,
    Model,
    PrefixCache,
    Server,
    best,
    check_fields,
    exactly,
    flag,
    ids,
    rank,
    text,
    whole,
)

COUNT = whole(-1, 2**31)
SAMPLING = {  # what another value would do is not played
    "temperature": exactly(0.0, 0),
    "max_tokens": exactly(1),
    "repetition_penalty": exactly(1.0),
    "presence_penalty": exactly(0.0),
    "frequency_penalty": exactly(0.0),
    "top_p": exactly(1.0),
    "top_k": exactly(0, -1),
    "min_p": exactly(0.0),
}
GENERATE = {
    "model": text,
    "token_ids": ids,
    "cache_salt": lambda value: text(value) and len(value) <= 1024,
    "sampling_params": lambda value: isinstance(value, dict),
    "content_parts": lambda value: isinstance(value, list) and len(value) == 1,
}
GENERATE_SAMPLING = {
    **SAMPLING,
    "prompt_logprobs": COUNT,
    "logprobs": COUNT,
    "skip_reading_prefix_cache": flag,
    "detokenize": flag,
}
PART = {"type": exactly("audio_url"), "url": lambda value: value is None or text(value), "uuid": text}
COMPLETIONS = {
    **SAMPLING,
    "model": text,
    "prompt": lambda value: ids(value) or (isinstance(value, list) and bool(value) and all(map(ids, value))),
    "logprobs": COUNT,
    "prompt_logprobs": COUNT,
    "return_tokens_as_token_ids": flag,
    "cache_salt": lambda value: text(value) and len(value) <= 1024,
    "allowed_token_ids": ids,
}
Garbage = Literal["zeros", "random", "lies", "nan"]


class VllmServer(Server):
    """One `vllm serve`.

    runner: "v2" sends rows of what it read anew; "v1" sends all, those of cached tokens as `garbage` (nan: a 400).
    logits: the --logprobs-mode is raw_logits, not raw_logprobs. max_logprobs: −1 for all. scale_out: 200, or the status
    with which the endpoint is refused where the option was not given. length: --max-model-len. old: 0.24, whose
    generate endpoint is always open, ignores fields that it does not know (recordings among them), counts no tokens in
    its answer, and names the tokens of generated rows as text.
    """

    scheme = "vllm"

    def __init__(
        self,
        model: Model,
        *,
        name: str = "tiny",
        runner: str = "v2",
        garbage: Garbage = "zeros",
        max_logprobs: int = 20,
        logits: bool = True,
        scale_out: int = 200,
        length: int = 512,
        old: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.name, self.runner, self.garbage, self.max_logprobs = name, runner, garbage, max_logprobs
        self.logits, self.scale_out, self.length, self.old = logits, scale_out, length, old
        self.paths = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/detokenize"): self._detokenize,
        }
        self.forget()

    def forget(self) -> None:
        self.cache = PrefixCache()
        self.media: dict[str, np.ndarray] = {}

    def error(self, status: int, message: str) -> Json:
        return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}

    def _models(self, _: Json) -> Json:
        card = {"object": "model", "owned_by": "vllm", "root": "/models/tiny", "permission": []}
        own = {**card, "id": self.name, "parent": None, "max_model_len": self.length}
        adapter = {**card, "id": "adapter", "parent": self.name, "max_model_len": None}
        return {"object": "list", "data": [adapter, own]}

    def _detokenize(self, body: Json) -> Json:
        check_fields(body, {"model": text, "tokens": ids}, "detokenize", ("tokens",))
        self._check_model(body)
        return {"prompt": self.model.decode(body["tokens"])}

    # POST /inference/v1/generate ----------------------------------------------------------------------------

    def _generate(self, body: Json) -> Json:
        if self.scale_out == 404:
            raise Bad("Not Found", 404)
        if self.scale_out != 200:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise Bad(message, self.scale_out)
        if self.old:
            body.pop("content_parts", None)
        check_fields(body, GENERATE, "generate", ("token_ids", "sampling_params"))
        params = body["sampling_params"]
        check_fields(
            params, GENERATE_SAMPLING, "sampling_params", tuple(SAMPLING)
        )  # or the server's defaults would apply
        self._check_model(body)
        self._check_counts(params)
        tokens, audio, uuid = self._expanded(body)
        self._check_length(tokens)
        rows = self._rows(tokens, audio)
        reuse = not params.get("skip_reading_prefix_cache", "prompt_logprobs" in params)
        cached = self.cache.take((body.get("cache_salt"), uuid), tokens, reuse=reuse)
        self.read += len(tokens) - cached
        prompt_rows = None
        if "prompt_logprobs" in params:
            prompt_rows = self._prompt_rows(tokens, rows, cached, params["prompt_logprobs"])
        token, reason = self._next(rows[-1], None)
        top = params.get("logprobs")
        content = None if top is None else (_old_content if self.old else _content)(rows[-1], token, top)
        choice = {"index": 0, "finish_reason": reason, "token_ids": [token]}
        choice["logprobs"] = None if content is None else {"content": [content]}
        answer = {"request_id": "generate-tokens-1", "prompt_logprobs": prompt_rows, "kv_transfer_params": None}
        if self.old:
            return {**answer, "choices": [{**choice, "routed_experts": None}]}
        return {**answer, "choices": [{**choice, "stop_reason": None}], "usage": _usage(len(tokens), 1)}

    def _prompt_rows(self, tokens: list[int], rows: torch.Tensor, cached: int, top: int) -> list[Any]:
        """[null], then a row for each token but the first: as far as what is before it was read (v2), or all (v1)."""
        read = [_entries(rows[n - 1], tokens[n], top) for n in range(cached + 1, len(tokens))]
        if self.runner == "v2" or not cached:
            return [None, *read]
        if self.garbage == "nan":
            raise Bad("Out of range float values are not JSON compliant: nan")
        return [None, *(self._garbage(tokens[n], top) for n in range(1, cached + 1)), *read]

    def _garbage(self, own: int, top: int) -> Json:
        """What was in memory. Lies are the worst of it: rows of another request, in which the token is no surprise."""
        if self.garbage == "zeros":
            return {"0": {"logprob": 0.0, "rank": 0, "decoded_token": None}}
        if self.garbage == "lies":
            return {
                str((own + n) % self.model.rows): {"logprob": 25.0 - 5 * n, "rank": n + 1, "decoded_token": None}
                for n in range(max(top, 2) + 1)
            }
        drawn = random.Random(self.read)
        return {
            str(drawn.randrange(self.model.rows)): {"logprob": drawn.uniform(-30, 30), "rank": 1, "decoded_token": None}
            for _ in range(max(top, 2) + 1)
        }

    def _expanded(self, body: Json) -> tuple[list[int], np.ndarray | None, str | None]:
        """The prompt with its one placeholder as many times as the recording has positions."""
        if "content_parts" not in body:
            return body["token_ids"], None, None
        (part,) = body["content_parts"]
        check_fields(part, PART, "content_parts.0", ("type", "uuid"))
        uuid, front = part["uuid"], self.model.engine.audio
        if part.get("url") is not None:
            self.media[uuid] = _recording(part["url"])
        if uuid not in self.media:
            raise Bad("Cache miss for audio at index 0 but data is not provided.")
        audio = self.media[uuid]
        if body["token_ids"].count(front.placeholder) != 1:
            raise Bad("Expected there to be 1 prompt placeholders corresponding to 1 audio items")
        return _placed(body["token_ids"], front.placeholder, front.token_count(len(audio))), audio, uuid

    # POST /v1/completions -----------------------------------------------------------------------------------

    def _completions(self, body: Json) -> Json:
        check_fields(body, COMPLETIONS, "completions", ("prompt", *SAMPLING))
        self._check_model(body)
        self._check_counts(body)
        if max(body.get("allowed_token_ids", [0])) >= self.model.rows:
            raise Bad("allowed_token_ids contains out-of-vocab token id!")
        if self.old and body.get("logprobs", 0) < 0:
            raise Bad("`logprobs` must be a positive value.")
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        longest = max(prompts, key=len)
        rows = self._rows(longest, None)
        known = [rows[: len(one)] if one == longest[: len(one)] else self._rows(one, None) for one in prompts]
        choices = [self._choice(n, tokens, known[n], body) for n, tokens in enumerate(prompts)]
        random.Random(self.read).shuffle(choices)  # they say which is which
        read = sum(map(len, prompts))
        return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": _usage(read, len(prompts))}

    def _choice(self, n: int, tokens: list[int], rows: torch.Tensor, body: Json) -> Json:
        self._check_length(tokens)
        whole_prompt = "prompt_logprobs" in body
        self.read += len(tokens) - self.cache.take((body.get("cache_salt"), None), tokens, reuse=not whole_prompt)
        token, reason = self._next(rows[-1], body.get("allowed_token_ids"))
        told = None
        if "logprobs" in body:
            if not body.get("return_tokens_as_token_ids"):
                raise Bad("two tokens of one spelling would share an entry: not played")
            found = dict([(token, float(rows[-1][token])), *best(rows[-1], body["logprobs"])])
            told = {
                "text_offset": [0],
                "token_logprobs": [found[token]],
                "tokens": [f"token_id:{token}"],
                "top_logprobs": [{f"token_id:{one}": value for one, value in found.items()}],
            }
        prompt_rows = self._prompt_rows(tokens, rows, 0, body["prompt_logprobs"]) if whole_prompt else None
        return {
            "index": n,
            "text": self.model.decode([token]),
            "logprobs": told,
            "finish_reason": reason,
            "stop_reason": None,
            "prompt_logprobs": prompt_rows,
        }

    # Shared -------------------------------------------------------------------------------------------------

    def _rows(self, tokens: list[int], audio: np.ndarray | None) -> torch.Tensor:
        rows = self.model.read(tokens, audio)
        return rows if self.logits else torch.log_softmax(rows, -1)

    def _next(self, row: torch.Tensor, allowed: list[int] | None) -> tuple[int, str]:
        token = max(allowed, key=lambda one: float(row[one])) if allowed else int(row.argmax())
        return token, "stop" if token in self.model.eos else "length"

    def _check_model(self, body: Json) -> None:
        if body.get("model") != self.name:
            raise Bad(f"The model `{body.get('model')}` does not exist.", 404)

    def _check_counts(self, params: Json) -> None:
        limit = self.model.rows if self.max_logprobs == -1 else self.max_logprobs
        for name, word in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            wanted = params.get(name, 0)
            count = self.model.rows if wanted == -1 else wanted
            if count > limit:
                raise Bad(f"Requested {word} logprobs of {count}, which is greater than max allowed: {limit}")

    def _check_length(self, tokens: list[int]) -> None:
        if len(tokens) + 1 > self.length:
            raise Bad(
                f"This model's maximum context length is {self.length} tokens. However, you requested 1 output tokens "
                f"and your prompt contains {len(tokens)} input tokens."
            )


def _placed(tokens: list[int], placeholder: int, count: int) -> list[int]:
    at = tokens.index(placeholder)
    return [*tokens[:at], *[placeholder] * count, *tokens[at + 1 :]]


def _recording(url: str) -> np.ndarray:
    head, _, data = url.partition(";base64,")
    if head not in ("data:audio/flac", "data:audio/wav"):
        raise Bad(f"The URL must be either a HTTP, data or file URL: {head}")
    wave, rate = soundfile.read(io.BytesIO(base64.b64decode(data, validate=True)), dtype="float32")
    if rate != 16_000 or wave.ndim != 1:
        raise Bad("the recording would be resampled: not played")
    return wave


def _entries(row: torch.Tensor, own: int, top: int) -> Json:
    """The token that stands there, then the best."""
    found = {own: (float(row[own]), rank(row, own))}
    found |= {one: (value, n) for n, (one, value) in enumerate(best(row, top), 1)}
    return {str(one): {"logprob": value, "rank": n, "decoded_token": None} for one, (value, n) in found.items()}


def _content(row: torch.Tensor, token: int, top: int) -> Json:
    named = _entries(row, token, top).items()
    entries = [{"token_id": int(one), "logprob": entry["logprob"], "rank": entry["rank"]} for one, entry in named]
    return {**entries[0], "top_logprobs": entries if top < 0 else entries[: max(top, 1)]}


def _old_content(row: torch.Tensor, token: int, top: int) -> Json:
    """A generated token's row in 0.24: the first `top` entries, and only one if all are requested."""
    named = [(f"token_id:{one}", entry["logprob"]) for one, entry in _entries(row, token, top).items()]
    entries = [{"token": name, "logprob": max(value, -9999.0), "bytes": None} for name, value in named]
    return {**entries[0], "top_logprobs": entries[: max(top, 1)]}


def _usage(read: int, made: int) -> Json:
    return {"prompt_tokens": read, "total_tokens": read + made, "completion_tokens": made}
