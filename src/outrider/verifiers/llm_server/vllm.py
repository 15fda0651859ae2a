"""vLLM's HTTP server as a verifier (vllm://host:port), in one of two request modes that the probe chooses.

    prompt_logprobs   POST /inference/v1/generate, which 0.32 offers if started with --enable-scale-out, and 0.24
                      always. The request is one sequence, prompt and drafts, with the log-probabilities of its tokens.
                      The prefix cache serves the earlier tokens, and the answer has the rows of the later ones.
                      Recordings need this mode, in a version whose answers count the tokens of the prompt (`usage`).
    per_prefix        POST /v1/completions, for any server. The request has k+1 prompts, each one draft longer, and
                      generates one token for each. The prefix cache serves them up to the last whole block, so a
                      verdict computes about k+1 times as many tokens.

/v1/completions with prompt_logprobs is not used, because vLLM then recomputes the whole prompt for every request.

Rows are raw: no penalty is applied to them. They are logits if the server was started with `--logprobs-mode
raw_logits`, else log-probabilities. `--max-logprobs` limits the number of entries.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from outrider.errors import CloudRefused, SettingsError
from outrider.sampling.top_logprobs import TopLogprobs
from outrider.transport.http_client import HttpClient, HttpResponse, Json
from outrider.verifiers.llm_server import backend
from outrider.verifiers.llm_server.backend import (
    ALL_LOGPROBS,
    PROBE_TIMEOUT,
    CachedLogprobsMissing,
    Capabilities,
    LogprobsRequest,
    MediaMissing,
)
from outrider.verifiers.llm_server.logit_noise import PROBE_PROMPT, PROBE_TOP

PROMPT_LOGPROBS, PER_PREFIX = "prompt_logprobs", "per_prefix"
HYBRID = "hybrid"  # per_prefix for texts, prompt_logprobs for recordings, if necessary without the prefix cache
TOP_CANDIDATES = (ALL_LOGPROBS, 4096, 1024, 256, 64, 20, PROBE_TOP)  # to try; vLLM's default limit is 20
SCALE_OUT = "scale-out"  # vLLM's error message contains this text if the endpoint is disabled, and the option to set
GENERATE_PATH = "/inference/v1/generate"
DEFAULT_PARAMS = {  # explicit, because a server may have other defaults
    "temperature": 0.0,
    "max_tokens": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
COST = "reads each block as k+1 prompts, at some k+1 times the work"
CACHE_WARNING = (
    "vllm://{} does not send rows with its prefix cache ({}): it reads each block as k+1 prompts{}; start vllm with "
    "MALLOC_PERTURB_=255 in its environment, or VLLM_USE_V2_MODEL_RUNNER=1"
)
NO_ENDPOINT = f"this version of vllm has no {GENERATE_PATH}"
UNCOUNTED = (
    f"the answers of its {GENERATE_PATH} do not count the tokens of the prompt, so a recording in it could go "
    "unnoticed; vllm 0.24 is such a version, and 0.32 with --enable-scale-out is not"
)


class _EndpointClosed(CloudRefused):
    """The server does not have the endpoint, for `reason`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class VllmBackend:
    """The backend for vLLM. It has no state."""

    scheme, product = "vllm", "vLLM"
    logits_hint = "start vllm with --logprobs-mode raw_logits"

    def more_hint(self, capabilities: Capabilities, count: int) -> str:
        """Return advice on how to get `count` entries of a row."""
        start = f"vllm with --max-logprobs {count}"
        return f"use a later {start}" if count < 0 and _lacks_whole_rows(capabilities) else f"start {start}"

    async def probe(self, client: HttpClient) -> Capabilities:
        """Determine the capabilities and the request mode with requests for the probe prompt.

        Raises:
            CloudRefused: the server has no model, or provides rows in neither mode.
            Retryable: the server is not ready.
        """
        model, length = await self.read_model(client)
        plain = Capabilities(model, length, PROMPT_LOGPROBS, PROBE_TOP, normalised=False, noise=0.0, sample=())
        plain = replace(plain, sends_computed_rows=True)
        return await self._probe_prompt_logprobs(client, plain)

    async def read_model(self, client: HttpClient) -> tuple[str, int | None]:
        """Return the name of the served model, and the most positions of a sequence (None without a limit)."""
        content = await backend.get_info(self, client, "/v1/models")
        with backend.parse_errors(client.name):
            served = [card for card in content.get("data", ()) if not card.get("parent")]  # LoRA adapters have one
            if not served:
                raise CloudRefused(f"{client.name} serves no model, or is not a vLLM server")
            length = served[0].get("max_model_len")
            return str(served[0]["id"]), int(length) - 1 if length else None  # each request generates one token

    async def _probe_prompt_logprobs(self, client: HttpClient, capabilities: Capabilities) -> Capabilities:
        """Probe prompt_logprobs with the prefix cache, and fall back to another mode if its rows are missing."""
        probe = backend.probe_request()
        try:
            path, body = self.build_request(fresh := replace(probe, skip_cache=True), capabilities)
            answer = await backend.post_json(self, client, path, body)
            read = self.parse_logprobs(answer, fresh, capabilities)
            capabilities = replace(capabilities, media_refusal="" if answer.get("usage") else UNCOUNTED)
            await backend.fetch_logprobs(self, client, replace(probe, ids=PROBE_PROMPT, rows=1), capabilities)
            reused = await backend.fetch_logprobs(self, client, probe, capabilities)
        except CachedLogprobsMissing as error:
            per_prefix = await self._probe_per_prefix(client, capabilities)
            others = "" if capabilities.media_refusal else " and recordings without the cache"
            warning = CACHE_WARNING.format(client.name, error, others)
            return replace(per_prefix, mode=HYBRID if others else PER_PREFIX, warning=warning)
        except CloudRefused as error:
            per_prefix = await self._probe_per_prefix(client, capabilities)
            reason = _reason(client.name, error)
            return replace(per_prefix, media_refusal=reason, warning=f"vllm://{client.name} {COST}: {reason}")
        return await self._measured(client, capabilities, read, reused)

    async def _probe_per_prefix(self, client: HttpClient, capabilities: Capabilities) -> Capabilities:
        capabilities = replace(capabilities, mode=PER_PREFIX, sends_computed_rows=False)
        probe = backend.probe_request()
        read = await backend.fetch_logprobs(self, client, probe, capabilities)
        again = await backend.fetch_logprobs(self, client, probe, capabilities)
        return await self._measured(client, capabilities, read, again)

    async def _measured(
        self, client: HttpClient, capabilities: Capabilities, read: list[TopLogprobs], again: list[TopLogprobs]
    ) -> Capabilities:
        capabilities = replace(capabilities, top=await self._find_max_top(client, capabilities))
        return backend.with_noise(client.name, capabilities, read, again)

    async def _find_max_top(self, client: HttpClient, capabilities: Capabilities) -> int:
        """Return how many entries of a row the server sends, found with one-token prompts, which have no rows."""
        for top in TOP_CANDIDATES[1:] if _lacks_whole_rows(capabilities) else TOP_CANDIDATES:
            request = LogprobsRequest(PROBE_PROMPT[:1], 1, capabilities.top, uuid.uuid4().hex)
            path, body = self.build_request(request, capabilities)
            (body if capabilities.mode == PER_PREFIX else body["sampling_params"])["prompt_logprobs"] = top
            reply = await client.post(path, body, PROBE_TIMEOUT)
            if reply.status == 200:
                return top
            if reply.status != 400:
                raise self.map_error(client.name, reply)
            limit = re.search(r"greater than max allowed: (\d{1,9})\b", reply.error)
            if limit is not None and int(limit[1]) >= TOP_CANDIDATES[-1]:
                return int(limit[1])
        raise CloudRefused(
            f"{client.name} sends fewer than {PROBE_TOP} entries of a row: start vllm with --max-logprobs 20 or more"
        )

    # Requests and answers -----------------------------------------------------------------------------------

    def build_request(self, request: LogprobsRequest, capabilities: Capabilities) -> tuple[str, Json]:
        """Return path and body of a request for the rows."""
        if request.media is not None and capabilities.media_refusal:
            raise SettingsError(f"this vllm server cannot verify a recording: {capabilities.media_refusal}")
        if _mode(request, capabilities) == PER_PREFIX:
            return "/v1/completions", _per_prefix_body(request, capabilities)
        return GENERATE_PATH, _prompt_logprobs_body(request, capabilities)

    def parse_logprobs(self, content: Json, request: LogprobsRequest, capabilities: Capabilities) -> list[TopLogprobs]:
        """Return the rows in the answer."""
        parse = _parse_per_prefix if _mode(request, capabilities) == PER_PREFIX else _parse_prompt_logprobs
        with backend.parse_errors("vllm"):
            return parse(content, request, capabilities)

    def map_error(self, name: str, reply: HttpResponse) -> Exception:
        """Return the exception for a status other than 200."""
        if reply.status == 404:
            return _EndpointClosed(f"{name}: {reply.reason}", NO_ENDPOINT)
        if SCALE_OUT in reply.error.lower():
            return _EndpointClosed(f"{name}: {reply.reason}", reply.error.rstrip("."))
        if "not JSON compliant" in reply.error:  # rows of cached tokens are uninitialised memory, here NaN
            return CachedLogprobsMissing(reply.error)
        if "Cache miss" in reply.error:
            return MediaMissing(reply.error)
        return backend.map_error(name, reply)

    async def detokenize(self, client: HttpClient, capabilities: Capabilities, ids: Sequence[int]) -> str:
        """Decode ids with the server's tokenizer."""
        body = {"model": capabilities.model, "tokens": list(ids)}
        content = await backend.post_json(self, client, "/detokenize", body)
        with backend.parse_errors(client.name):
            return str(content["prompt"])

    async def is_eos(self, client: HttpClient, capabilities: Capabilities, token: int) -> bool:
        """Return whether the server stops when only this token is allowed."""
        request = {"model": capabilities.model, "prompt": list(PROBE_PROMPT[:4]), "allowed_token_ids": [token]}
        body = {**DEFAULT_PARAMS, **request}
        content = await backend.post_json(self, client, "/v1/completions", body)
        with backend.parse_errors(client.name):
            return str(content["choices"][0]["finish_reason"]) == "stop"


def _reason(name: str, error: CloudRefused) -> str:
    """Return the reason that a block cannot be verified as one sequence."""
    if isinstance(error, _EndpointClosed):
        return error.reason
    return f"as one sequence it could not be verified ({str(error).removeprefix(f'{name}: ')})"


def _lacks_whole_rows(capabilities: Capabilities) -> bool:
    """Return whether the server is a version like 0.24, which sends no row of a generated token with all entries."""
    return capabilities.media_refusal == UNCOUNTED


def _mode(request: LogprobsRequest, capabilities: Capabilities) -> str:
    if capabilities.mode != HYBRID:
        return capabilities.mode
    return PER_PREFIX if request.media is None else PROMPT_LOGPROBS


def _prompt_logprobs_body(request: LogprobsRequest, capabilities: Capabilities) -> Json:
    params: Json = {
        **DEFAULT_PARAMS,
        "logprobs": request.top,
        "skip_reading_prefix_cache": request.skip_cache,
        "detokenize": False,
    }
    if request.rows > 1:  # else the server would send the rows of the whole prompt for none that is needed
        params["prompt_logprobs"] = request.top
    body: Json = {
        "model": capabilities.model,
        "token_ids": list(request.ids),
        "cache_salt": request.session,
        "sampling_params": params,
    }
    if request.media is not None:
        media = request.media
        prompt = [
            token
            for key, run in groupby(request.ids[: media.prompt_length])
            for token in ([key] if key == media.placeholder else run)  # the server repeats the placeholder
        ]
        body["token_ids"] = [*prompt, *request.ids[media.prompt_length :]]
        body["content_parts"] = [{"type": "audio_url", "url": media.url, "uuid": media.uuid}]
    return body


def _per_prefix_body(request: LogprobsRequest, capabilities: Capabilities) -> Json:
    ids, first = list(request.ids), len(request.ids) - request.rows + 1
    return {
        **DEFAULT_PARAMS,
        "model": capabilities.model,
        "prompt": [ids[:length] for length in range(first, len(ids) + 1)],
        "logprobs": request.top,
        "return_tokens_as_token_ids": True,
        "cache_salt": request.session,
    }


def _parse_prompt_logprobs(content: Json, request: LogprobsRequest, capabilities: Capabilities) -> list[TopLogprobs]:
    """Return the rows of the last `request.rows` − 1 prompt tokens and of the generated token.

    Tokens in the prefix cache have no rows: vLLM omits them (model runner V2) or sends uninitialised memory (V1). The
    number of prompt tokens matters for recordings, which the server expands. It takes the ids of a text as they are.
    """
    is_counted = request.media is not None or content.get("usage") is not None
    if is_counted and (prompt_tokens := content["usage"]["prompt_tokens"]) != len(request.ids):
        raise CloudRefused(
            f"vllm makes {prompt_tokens} tokens of the prompt, the drafter {len(request.ids)}: the two probably make "
            "other audio tokens of the recording"
        )
    drafts = list(request.ids[len(request.ids) - request.rows + 1 :])
    entries_per_draft = (content["prompt_logprobs"] or [])[-len(drafts) :] if drafts else []
    if len(entries_per_draft) < len(drafts) or not all(
        _is_complete_row(row, d, request.top) for row, d in zip(entries_per_draft, drafts, strict=True)
    ):
        raise CachedLogprobsMissing("rows of cached tokens")
    found = [
        _row({int(token): entry["logprob"] for token, entry in row.items()}, request, capabilities)
        for row in entries_per_draft
    ]
    (choice,) = content["choices"]
    (last,) = choice["logprobs"]["content"]
    backend.check_eos(request, _token_id(last), ended=choice["finish_reason"] == "stop")
    bonus = {_token_id(entry): entry["logprob"] for entry in (last, *last["top_logprobs"])}
    return [*found, _row(bonus, request, capabilities)]


def _parse_per_prefix(content: Json, request: LogprobsRequest, capabilities: Capabilities) -> list[TopLogprobs]:
    choices = sorted(content["choices"], key=lambda choice: choice["index"])
    if len(choices) != request.rows:
        raise CloudRefused(f"vllm answered {len(choices)} of {request.rows} prompts")
    found = []
    for choice in choices:
        (best,) = choice["logprobs"]["top_logprobs"]
        (token,) = choice["logprobs"]["tokens"]
        found.append(_row({_parse_token_id(name): value for name, value in best.items()}, request, capabilities))
    backend.check_eos(request, _parse_token_id(token), ended=choice["finish_reason"] == "stop")
    return found


def _is_complete_row(entries: Json | None, token: int, top: int) -> bool:
    """Return whether a row has an entry for `token`, which follows it, and entries of all ranks from 1 to top."""
    if not entries or str(token) not in entries:
        return False
    ranks = {entry["rank"] for entry in entries.values()}
    return len(entries) > 1 if top == ALL_LOGPROBS else ranks.issuperset(range(1, top + 1))


def _token_id(entry: Json) -> int:
    """Return the id of an entry for a generated token. vLLM 0.24 names it in `token`, as "token_id:N"."""
    return int(entry["token_id"]) if "token_id" in entry else _parse_token_id(entry["token"])


def _parse_token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _row(entries: Mapping[int, float], request: LogprobsRequest, capabilities: Capabilities) -> TopLogprobs:
    """Convert a row. entries: the best request.top, and possibly one more for the token at this position."""
    values = np.array(list(entries.values()), dtype=np.float32)
    floor = -np.inf if request.top == ALL_LOGPROBS else np.sort(values)[-min(request.top, len(values))]
    return TopLogprobs(np.array(list(entries), dtype=np.int64), values, float(floor), capabilities.normalised)
