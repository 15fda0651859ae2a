"""vLLM's HTTP server as a verifier (vllm://host:port): two ways to ask it, found out at start-up.

    tail     POST /inference/v1/generate (a server started with --enable-scale-out): one sequence, prompt and drafts,
             with log-probabilities of its prompt; the prefix cache serves what was read before, and the rows of the
             tokens behind it come back. Recordings go this way only.
    spread   POST /v1/completions (any server): k+1 prompts, each one draft longer, one token generated for each. The
             prefix cache serves these too, up to the last whole block, so what is read anew is some k+1 times as much.

vLLM's own /v1/completions with prompt_logprobs is neither: it reads the whole prompt anew for every request.

Rows are raw: no penalty is applied to them. They are logits where the server was started with `--logprobs-mode
raw_logits`, else log-probabilities; `--max-logprobs` limits how many entries of each are sent.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from outrider.core.partial import PartialRow
from outrider.errors import CloudRefused, SettingsError
from outrider.verifiers import server
from outrider.verifiers.measure import PROBED, PROMPT
from outrider.verifiers.server import PATIENT, WHOLE, Abilities, Ask, MediaMissing, Reread
from outrider.wire.web import Json, Reply, Web

TAIL, SPREAD = "tail", "spread"
MIXED = "mixed"  # spread for texts; tail, read anew where that fails, for recordings, which cannot go the other way
TOPS = (WHOLE, 4096, 1024, 256, 64, 20, PROBED)  # entries of a row that a server may let us have; its default is 20
ENDPOINT = "--enable-scale-out"  # opens the way of the tail; the refusal of one that is not open names it
PLAIN = {  # what a server's own defaults would otherwise set
    "temperature": 0.0,
    "max_tokens": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
SLOW = "reads each block as k+1 prompts, at some k+1 times the work"
CACHED = (
    "vllm://{} fails where the prefix cache is at work ({}): blocks are read as k+1 prompts, recordings anew each "
    "time; start vllm with MALLOC_PERTURB_=255 in its environment, or with model runner V2"
)


class _Closed(CloudRefused):
    """The endpoint is not there."""


class Vllm:
    """The dialect; it keeps nothing."""

    scheme, product = "vllm", "vLLM"
    logits = "start vllm with --logprobs-mode raw_logits"
    more = "start vllm with --max-logprobs {}"

    async def probe(self, web: Web) -> Abilities:
        """Find out what the server can do, and prove it on a known prompt.

        Raises:
            CloudRefused: it serves no model, or cannot be asked for rows in any way.
            Again: it is not ready.
        """
        model, length = await self._model(web)
        plain = Abilities(model, length, TAIL, PROBED, normalised=False, noise=0.0, sample=())
        return await self._tail(web, plain)

    async def _model(self, web: Web) -> tuple[str, int | None]:
        content = await server.told_of_itself(self, web, "/v1/models")
        with server.reading(web.name):
            served = [card for card in content.get("data", ()) if not card.get("parent")]  # others are adapters
            if not served:
                raise CloudRefused(f"{web.name} serves no model, or is no vLLM server")
            length = served[0].get("max_model_len")
            return str(served[0]["id"]), int(length) - 1 if length else None  # one is generated behind what is judged

    async def _tail(self, web: Web, able: Abilities) -> Abilities:
        """With the prefix cache at work, if rows come back right; in another way where they do not."""
        whole = server.known()
        try:
            read = await server.asked(self, web, replace(whole, fresh=True), able)
            await server.asked(self, web, replace(whole, ids=PROMPT, rows=1), able)
            reused = await server.asked(self, web, whole, able)
        except Reread as error:
            spread = await self._spread(web, able)
            return replace(spread, way=MIXED, caution=CACHED.format(web.name, error))
        except CloudRefused as error:
            return replace(await self._spread(web, able), caution=_caution(web.name, error))
        return server.proven(web.name, replace(able, top=await self._most(web, able)), read, reused)

    async def _spread(self, web: Web, able: Abilities) -> Abilities:
        able = replace(able, way=SPREAD)
        whole = server.known()
        read = await server.asked(self, web, whole, able)
        again = await server.asked(self, web, whole, able)
        return server.proven(web.name, replace(able, top=await self._most(web, able)), read, again)

    async def _most(self, web: Web, able: Abilities) -> int:
        """How many entries of a row the server sends: asked with a prompt of one token, which has no rows itself."""
        for top in TOPS:
            path, body = self.request(Ask(PROMPT[:1], 1, able.top, uuid.uuid4().hex), able)
            (body if able.way == SPREAD else body["sampling_params"])["prompt_logprobs"] = top
            reply = await web.post(path, body, PATIENT)
            if reply.status == 200:
                return top
            if reply.status != 400:
                raise self.failure(web.name, reply)
            limit = re.search(r"greater than max allowed: (\d+)", reply.error)
            if limit is not None and int(limit[1]) >= TOPS[-1]:
                return int(limit[1])
        raise CloudRefused(
            f"{web.name} sends fewer than {PROBED} entries of a row: start vllm with --max-logprobs 20 or more"
        )

    # Asking and reading -------------------------------------------------------------------------------------

    def request(self, ask: Ask, able: Abilities) -> tuple[str, Json]:
        if _way(ask, able) == SPREAD:
            if ask.media is not None:
                raise SettingsError("a recording needs vllm to be started with --enable-scale-out")
            return "/v1/completions", _spread_body(ask, able)
        return "/inference/v1/generate", _tail_body(ask, able)

    def rows(self, content: Json, ask: Ask, able: Abilities) -> list[PartialRow]:
        with server.reading("vllm"):
            return (_spread_rows if _way(ask, able) == SPREAD else _tail_rows)(content, ask, able)

    def failure(self, name: str, reply: Reply) -> Exception:
        if reply.status == 404 or ENDPOINT in reply.error:
            return _Closed(f"{name}: {reply.reason}")
        if "not JSON compliant" in reply.error:  # rows of cached tokens, which no one has filled in
            return Reread(reply.error)
        if "Cache miss" in reply.error:
            return MediaMissing(reply.error)
        return server.failure(name, reply)

    async def text(self, web: Web, able: Abilities, ids: Sequence[int]) -> str:
        content = await server.told(self, web, "/detokenize", {"model": able.model, "tokens": list(ids)})
        with server.reading(web.name):
            return str(content["prompt"])

    async def ends(self, web: Web, able: Abilities, token: int) -> bool:
        body = {**PLAIN, "model": able.model, "prompt": list(PROMPT[:4]), "allowed_token_ids": [token]}
        content = await server.told(self, web, "/v1/completions", body)
        with server.reading(web.name):
            return str(content["choices"][0]["finish_reason"]) == "stop"


def _caution(name: str, error: CloudRefused) -> str:
    if isinstance(error, _Closed):
        return f"vllm://{name} {SLOW}: start it with {ENDPOINT}"
    return f"vllm://{name} {SLOW}: as one sequence it could not be verified ({str(error).removeprefix(f'{name}: ')})"


def _way(ask: Ask, able: Abilities) -> str:
    if able.way != MIXED:
        return able.way
    return SPREAD if ask.media is None else TAIL


def _tail_body(ask: Ask, able: Abilities) -> Json:
    params = {
        **PLAIN,
        "prompt_logprobs": ask.top,
        "logprobs": ask.top,
        "skip_reading_prefix_cache": ask.fresh,
        "detokenize": False,
    }
    body: Json = {"model": able.model, "token_ids": list(ask.ids), "cache_salt": ask.session, "sampling_params": params}
    if ask.media is not None:
        media = ask.media
        prompt = [
            token
            for key, run in groupby(ask.ids[: media.until])
            for token in ([key] if key == media.placeholder else run)  # the server expands it
        ]
        body["token_ids"] = [*prompt, *ask.ids[media.until :]]
        body["content_parts"] = [{"type": "audio_url", "url": media.url, "uuid": media.uuid}]
    return body


def _spread_body(ask: Ask, able: Abilities) -> Json:
    ids, first = list(ask.ids), len(ask.ids) - ask.rows + 1
    return {
        **PLAIN,
        "model": able.model,
        "prompt": [ids[:length] for length in range(first, len(ids) + 1)],
        "logprobs": ask.top,
        "return_tokens_as_token_ids": True,
        "cache_salt": ask.session,
    }


def _tail_rows(content: Json, ask: Ask, able: Abilities) -> list[PartialRow]:
    """From the prompt's log-probabilities, of which the last rows−1 count, and the generated token's.

    What lies in the prefix cache has no rows: they are missing (runner V2), or hold whatever was in memory (V1).
    """
    told = content["usage"]["prompt_tokens"]
    if told != len(ask.ids):
        raise CloudRefused(f"vllm makes {told} tokens of the prompt, the drafter {len(ask.ids)}: other audio tokens?")
    drafts = list(ask.ids[len(ask.ids) - ask.rows + 1 :])
    given = (content["prompt_logprobs"] or [])[-len(drafts) :] if drafts else []
    if len(given) < len(drafts) or not all(_is_row(row, d, ask.top) for row, d in zip(given, drafts, strict=True)):
        raise Reread("rows of cached tokens")
    found = [_row({int(token): entry["logprob"] for token, entry in row.items()}, ask, able) for row in given]
    (choice,) = content["choices"]
    (last,) = choice["logprobs"]["content"]
    server.check_end(ask, last["token_id"], ended=choice["finish_reason"] == "stop")
    bonus = {entry["token_id"]: entry["logprob"] for entry in last["top_logprobs"]}
    return [*found, _row({last["token_id"]: last["logprob"], **bonus}, ask, able)]


def _spread_rows(content: Json, ask: Ask, able: Abilities) -> list[PartialRow]:
    choices = sorted(content["choices"], key=lambda choice: choice["index"])
    if len(choices) != ask.rows:
        raise CloudRefused(f"vllm answered {len(choices)} of {ask.rows} prompts")
    found = []
    for choice in choices:
        (best,) = choice["logprobs"]["top_logprobs"]
        (token,) = choice["logprobs"]["tokens"]
        found.append(_row({_id(name): value for name, value in best.items()}, ask, able))
    server.check_end(ask, _id(token), ended=choice["finish_reason"] == "stop")
    return found


def _is_row(entries: Json | None, token: int, top: int) -> bool:
    """Whether this is a row with `token` behind it: that token is in it, and the ranks 1 to top are."""
    if not entries or str(token) not in entries:
        return False
    ranks = {entry["rank"] for entry in entries.values()}
    return len(entries) > 1 if top == WHOLE else ranks.issuperset(range(1, top + 1))


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _row(entries: Mapping[int, Any], ask: Ask, able: Abilities) -> PartialRow:
    """entries: the best ask.top of a row, and perhaps one more, the token that stands there."""
    values = np.array(list(entries.values()), dtype=np.float32)
    floor = -np.inf if ask.top == WHOLE else np.sort(values)[-min(ask.top, len(values))]
    return PartialRow(np.array(list(entries), dtype=np.int64), values, float(floor), able.normalised)
