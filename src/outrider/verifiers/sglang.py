"""SGLang's HTTP server as a verifier (sglang://host:port).

POST /generate with the whole sequence and `logprob_start_len` at the last token before the drafts: the radix cache
serves what lies before that, and rows come back from there on, as log-probabilities. Never run against SGLang itself
here, which needs a GPU: written after its documented exchanges, and tested with a server that checks every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.core.partial import PartialRow
from outrider.errors import CloudRefused, SettingsError
from outrider.verifiers import server
from outrider.verifiers.measure import DRAFTS, PROMPT, is_normalised
from outrider.verifiers.server import Abilities, Ask
from outrider.wire.web import Json, Reply, Web

MOST = 1024  # entries of a row; SGLang names no limit of its own
FORCED = 1e4  # a bias that leaves one token


class Sglang:
    """The dialect; it keeps nothing."""

    scheme, product = "sglang", "SGLang"
    logits = "use vllm or our own cloud, which send logits"
    more = "use vllm with --max-logprobs {}, or our own cloud"

    async def probe(self, web: Web) -> Abilities:
        """What it serves, and that it gives the same rows with and without its cache.

        Raises:
            CloudRefused: it is no SGLang server that can verify.
            Again: it is not ready.
        """
        model, length = await self._model(web)
        able = Abilities(model, length, "generate", MOST, normalised=True, noise=0.0, sample=())
        whole = server.known()
        await server.asked(self, web, replace(whole, ids=PROMPT, rows=1), able)
        read = await server.asked(self, web, replace(whole, rows=len(PROMPT) + len(DRAFTS)), able)
        reused = await server.asked(self, web, whole, able)
        if not is_normalised(read):
            raise CloudRefused(f"{web.name} sends rows that are no log-probabilities")
        return replace(server.proven(web.name, able, read[-len(reused) :], reused), normalised=True)

    async def _model(self, web: Web) -> tuple[str, int | None]:
        paths = ("/get_model_info", "/get_server_info")
        own, running = [await server.told_of_itself(self, web, path) for path in paths]
        model, length = own.get("model_path"), running.get("context_length")
        if not model:
            raise CloudRefused(f"{web.name} serves no model, or is no SGLang server")
        with server.reading(web.name):
            return str(model), int(length) - 1 if length else None

    def request(self, ask: Ask, able: Abilities) -> tuple[str, Json]:
        if ask.media is not None:
            raise SettingsError("sglang serves none of the audio models that outrider knows: use vllm or our own cloud")
        return "/generate", {
            "input_ids": list(ask.ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": len(ask.ids) - ask.rows,
            "top_logprobs_num": ask.top,
            "return_text_in_logprobs": False,
        }

    def rows(self, content: Json, ask: Ask, able: Abilities) -> list[PartialRow]:
        with server.reading("sglang"):
            return _rows(content["meta_info"], ask)

    def failure(self, name: str, reply: Reply) -> Exception:
        return server.failure(name, reply)

    async def text(self, web: Web, able: Abilities, ids: Sequence[int]) -> str:
        body = {"model": able.model, "tokens": list(ids), "skip_special_tokens": False}
        content = await server.told(self, web, "/v1/detokenize", body)
        with server.reading(web.name):
            return str(content["text"])

    async def ends(self, web: Web, able: Abilities, token: int) -> bool:
        params = {"temperature": 0.0, "max_new_tokens": 1, "logit_bias": {str(token): FORCED}}
        body = {"input_ids": list(PROMPT[:4]), "sampling_params": params}
        content = await server.told(self, web, "/generate", body)
        with server.reading(web.name):
            return str(content["meta_info"]["finish_reason"]["type"]) == "stop"


def _rows(told: Json, ask: Ask) -> list[PartialRow]:
    """The first entry is the token at logprob_start_len itself, which has no row there; each other names one draft."""
    drafts = list(ask.ids[len(ask.ids) - ask.rows + 1 :])
    named = [entry[1] for entry in told["input_token_logprobs"][1:]]
    if named != drafts:
        raise CloudRefused(f"sglang sends rows of the tokens {named[:8]}, not of the drafts {drafts[:8]}")
    (last,) = told["output_top_logprobs"]
    end = told["finish_reason"]
    server.check_end(ask, last[0][1], ended=end["type"] == "stop")
    return [_row(entries) for entries in [*told["input_top_logprobs"][1:], last]]


def _row(entries: Sequence[Sequence[float]]) -> PartialRow:
    """entries: [log-probability, token, text] each, the best first."""
    values = np.array([entry[0] for entry in entries], dtype=np.float32)
    ids = np.array([entry[1] for entry in entries], dtype=np.int64)
    return PartialRow(ids, values, float(values.min()), normalised=True)
