"""SGLang's HTTP server as a verifier (sglang://host:port).

A request is POST /generate with the whole sequence and `logprob_start_len` at the last token before the drafts. The
radix cache serves the tokens before that position, and the answer has log-probabilities from there on. This backend
follows SGLang's documentation and is tested with a server that checks every field. It has not been run against SGLang,
which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.errors import CloudRefused, SettingsError
from outrider.sampling.top_logprobs import TopLogprobs
from outrider.transport.http_client import HttpClient, HttpResponse, Json
from outrider.verifiers.llm_server import backend
from outrider.verifiers.llm_server.backend import Capabilities, LogprobsRequest
from outrider.verifiers.llm_server.logit_noise import PROBE_DRAFTS, PROBE_PROMPT, is_normalised

MAX_TOP = 1024  # entries of a row; SGLang documents no limit
FORCING_BIAS = 1e4  # a logit bias that excludes all other tokens


class SglangBackend:
    """The backend for SGLang. It has no state."""

    scheme, product = "sglang", "SGLang"
    logits_hint = "use vllm or our own cloud, which send logits"

    def more_hint(self, _: Capabilities, count: int) -> str:
        """Return advice on how to get `count` entries of a row."""
        return f"use vllm with --max-logprobs {count}, or our own cloud"

    async def probe(self, client: HttpClient) -> Capabilities:
        """Determine the capabilities, and compare the rows with and without the radix cache.

        Raises:
            CloudRefused: the server is not SGLang or cannot verify.
            Retryable: the server is not ready.
        """
        model, length = await self.read_model(client)
        capabilities = Capabilities(model, length, "generate", MAX_TOP, normalised=True, noise=0.0, sample=())
        probe = backend.probe_request()
        await backend.fetch_logprobs(self, client, replace(probe, ids=PROBE_PROMPT, rows=1), capabilities)
        read = await backend.fetch_logprobs(
            self, client, replace(probe, rows=len(PROBE_PROMPT) + len(PROBE_DRAFTS)), capabilities
        )
        reused = await backend.fetch_logprobs(self, client, probe, capabilities)
        if not is_normalised(read):
            raise CloudRefused(f"{client.name} sends rows that are no log-probabilities")
        return replace(backend.with_noise(client.name, capabilities, read[-len(reused) :], reused), normalised=True)

    async def read_model(self, client: HttpClient) -> tuple[str, int | None]:
        """Return the name of the served model, and the most positions of a sequence (None without a limit)."""
        paths = ("/get_model_info", "/get_server_info")
        own, running = [await backend.get_info(self, client, path) for path in paths]
        model, length = own.get("model_path"), running.get("context_length")
        if not model:
            raise CloudRefused(f"{client.name} serves no model, or is not an SGLang server")
        with backend.parse_errors(client.name):
            return str(model), int(length) - 1 if length else None

    def build_request(self, request: LogprobsRequest, capabilities: Capabilities) -> tuple[str, Json]:
        """Return path and body of a request for the rows."""
        if request.media is not None:
            raise SettingsError("sglang serves none of the audio models that outrider knows: use vllm or our own cloud")
        return "/generate", {
            "input_ids": list(request.ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": len(request.ids) - request.rows,
            "top_logprobs_num": request.top,
            "return_text_in_logprobs": False,
        }

    def parse_logprobs(self, content: Json, request: LogprobsRequest, capabilities: Capabilities) -> list[TopLogprobs]:
        """Return the rows in the answer."""
        with backend.parse_errors("sglang"):
            return _rows(content["meta_info"], request)

    def map_error(self, name: str, reply: HttpResponse) -> Exception:
        """Return the exception for a status other than 200."""
        return backend.map_error(name, reply)

    async def detokenize(self, client: HttpClient, capabilities: Capabilities, ids: Sequence[int]) -> str:
        """Decode ids with the server's tokenizer."""
        body = {"model": capabilities.model, "tokens": list(ids), "skip_special_tokens": False}
        content = await backend.post_json(self, client, "/v1/detokenize", body)
        with backend.parse_errors(client.name):
            return str(content["text"])

    async def is_eos(self, client: HttpClient, capabilities: Capabilities, token: int) -> bool:
        """Return whether the server stops when a logit bias forces this token."""
        params = {"temperature": 0.0, "max_new_tokens": 1, "logit_bias": {str(token): FORCING_BIAS}}
        body = {"input_ids": list(PROBE_PROMPT[:4]), "sampling_params": params}
        content = await backend.post_json(self, client, "/generate", body)
        with backend.parse_errors(client.name):
            return str(content["meta_info"]["finish_reason"]["type"]) == "stop"


def _rows(meta: Json, request: LogprobsRequest) -> list[TopLogprobs]:
    """Parse the rows. The first entry is for the token at logprob_start_len and has no row."""
    drafts = list(request.ids[len(request.ids) - request.rows + 1 :])
    named = [entry[1] for entry in meta["input_token_logprobs"][1:]]
    if named != drafts:
        raise CloudRefused(f"sglang sends rows of the tokens {named[:8]}, not of the drafts {drafts[:8]}")
    (last,) = meta["output_top_logprobs"]
    end = meta["finish_reason"]
    backend.check_eos(request, last[0][1], ended=end["type"] == "stop")
    return [_row(entries) for entries in [*meta["input_top_logprobs"][1:], last]]


def _row(entries: Sequence[Sequence[float]]) -> TopLogprobs:
    """Convert entries of the form [log-probability, token, text], the best first."""
    values = np.array([entry[0] for entry in entries], dtype=np.float32)
    ids = np.array([entry[1] for entry in entries], dtype=np.int64)
    return TopLogprobs(ids, values, float(values.min()), normalised=True)
