"""SGLang's HTTP server as a verifier (sglang://host:port).

POST /generate with the whole sequence and `logprob_start_len` at the last token before the drafts: the radix cache
serves what lies before that, and rows come back from there on, as log-probabilities. Never run against SGLang itself
here, which needs a GPU: written after its documented exchanges, and tested with a server that checks every field.
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

MAX_TOP = 1024  # entries of a row; SGLang names no limit of its own
FORCING_BIAS = 1e4  # a bias that leaves one token


class SglangBackend:
    """The backend; it keeps nothing."""

    scheme, product = "sglang", "SGLang"
    logits_hint = "use vllm or our own cloud, which send logits"
    more_hint = "use vllm with --max-logprobs {}, or our own cloud"

    async def probe(self, client: HttpClient) -> Capabilities:
        """What it serves, and that it gives the same rows with and without its cache.

        Raises:
            CloudRefused: it is no SGLang server that can verify.
            Retryable: it is not ready.
        """
        model, length = await self._model(client)
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

    async def _model(self, client: HttpClient) -> tuple[str, int | None]:
        paths = ("/get_model_info", "/get_server_info")
        own, running = [await backend.get_info(self, client, path) for path in paths]
        model, length = own.get("model_path"), running.get("context_length")
        if not model:
            raise CloudRefused(f"{client.name} serves no model, or is no SGLang server")
        with backend.parse_errors(client.name):
            return str(model), int(length) - 1 if length else None

    def build_request(self, request: LogprobsRequest, capabilities: Capabilities) -> tuple[str, Json]:
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
        with backend.parse_errors("sglang"):
            return _rows(content["meta_info"], request)

    def map_error(self, name: str, reply: HttpResponse) -> Exception:
        return backend.map_error(name, reply)

    async def detokenize(self, client: HttpClient, capabilities: Capabilities, ids: Sequence[int]) -> str:
        body = {"model": capabilities.model, "tokens": list(ids), "skip_special_tokens": False}
        content = await backend.post_json(self, client, "/v1/detokenize", body)
        with backend.parse_errors(client.name):
            return str(content["text"])

    async def is_eos(self, client: HttpClient, capabilities: Capabilities, token: int) -> bool:
        params = {"temperature": 0.0, "max_new_tokens": 1, "logit_bias": {str(token): FORCING_BIAS}}
        body = {"input_ids": list(PROBE_PROMPT[:4]), "sampling_params": params}
        content = await backend.post_json(self, client, "/generate", body)
        with backend.parse_errors(client.name):
            return str(content["meta_info"]["finish_reason"]["type"]) == "stop"


def _rows(meta: Json, request: LogprobsRequest) -> list[TopLogprobs]:
    """The first entry is the token at logprob_start_len itself, which has no row there; each other names one draft."""
    drafts = list(request.ids[len(request.ids) - request.rows + 1 :])
    named = [entry[1] for entry in meta["input_token_logprobs"][1:]]
    if named != drafts:
        raise CloudRefused(f"sglang sends rows of the tokens {named[:8]}, not of the drafts {drafts[:8]}")
    (last,) = meta["output_top_logprobs"]
    end = meta["finish_reason"]
    backend.check_eos(request, last[0][1], ended=end["type"] == "stop")
    return [_row(entries) for entries in [*meta["input_top_logprobs"][1:], last]]


def _row(entries: Sequence[Sequence[float]]) -> TopLogprobs:
    """entries: [log-probability, token, text] each, the best first."""
    values = np.array([entry[0] for entry in entries], dtype=np.float32)
    ids = np.array([entry[1] for entry in entries], dtype=np.int64)
    return TopLogprobs(ids, values, float(values.min()), normalised=True)
