"""How long a verifier's forward takes, and how many sessions fit beside its weights. Times are seconds, sizes bytes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from outrider.planning.validation import at_least_zero, count, positive, share


@dataclass(frozen=True)
class Gpu:
    """One GPU: its memory, what it copies and multiplies in a second, and its links to others of the host.

    link_latency_s: of one all-reduce of a few bytes; link_bytes_per_s: one way. Neither matters to a single GPU.
    """

    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float = 450e9
    link_latency_s: float = 15e-6

    def __post_init__(self) -> None:
        positive(**asdict(self))


@dataclass(frozen=True)
class Target:
    """The model that verifies. Rates are per token; `attention_flops` and `kv_bytes` per position of the context."""

    weight_bytes: float
    flops: float
    attention_flops: float
    kv_bytes: float
    layers: int
    hidden: int

    def __post_init__(self) -> None:
        positive(**asdict(self))

    @classmethod
    def of_shape(
        cls, *, layers: int, hidden: int, heads: int, kv_heads: int, head: int, feed_forward: int, vocabulary: int
    ) -> Target:
        """A decoder with gated feed-forward layers and untied embeddings, in bfloat16 (2 bytes a number).

        2 floating-point operations per weight that is multiplied (all but the input embedding); 4 per position and
        query component (scores, and weighted values).
        """
        count(1, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head=head, vocabulary=vocabulary)
        layer = hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * feed_forward
        multiplied = layers * layer + vocabulary * hidden
        return cls(
            weight_bytes=2.0 * (multiplied + vocabulary * hidden),
            flops=2.0 * multiplied,
            attention_flops=4.0 * layers * heads * head,
            kv_bytes=2.0 * 2.0 * layers * kv_heads * head,
            layers=layers,
            hidden=hidden,
        )


@dataclass(frozen=True)
class Host:
    """What a service adds to a forward on the CPU: per batch, and per request in it."""

    batch_s: float = 0.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero(**asdict(self))


@dataclass(frozen=True)
class Server:
    """One copy of a target over `gpus` GPUs (tensor parallel); `share`: of the memory that may be used."""

    target: Target
    gpu: Gpu
    gpus: int = 1
    host: Host = Host()
    share: float = 0.9

    def __post_init__(self) -> None:
        count(1, gpus=self.gpus)
        share(share=self.share)

    def reading_s(self, sessions: float, context: float) -> float:
        """Reading all weights once, the embedding too, and each session's keys and values."""
        size = self.target.weight_bytes + sessions * context * self.target.kv_bytes
        return size / (self.gpus * self.gpu.bytes_per_s)

    def computing_s(self, tokens: float, context: float) -> float:
        """Multiplying `tokens` in all, at the peak rate."""
        return tokens * (self.target.flops + context * self.target.attention_flops) / (self.gpus * self.gpu.flops_per_s)

    def exchanging_s(self, tokens: float) -> float:
        """Two ring all-reduces a layer of [tokens, hidden] in bfloat16 (Megatron-LM, arXiv 1909.08053); 0 on one GPU.

        Each sends 2·(g − 1)/g of it over every GPU's link.
        """
        if self.gpus == 1:
            return 0.0
        sent = 2 * (self.gpus - 1) / self.gpus * tokens * self.target.hidden * 2.0
        return 2 * self.target.layers * (self.gpu.link_latency_s + sent / self.gpu.link_bytes_per_s)

    def floor_s(self, sessions: float, tokens: int, context: float) -> float:
        """No forward is faster: the larger of reading and computing (Williams et al. 2009, the roofline)."""
        _check_batch(sessions, tokens, context)
        return max(self.reading_s(sessions, context), self.computing_s(sessions * tokens, context))

    def forward_s(self, sessions: float, tokens: int, context: float) -> float:
        """An estimate of a forward of `tokens` tokens for each session: reading *plus* computing and exchanging.

        The sum, as kernels overlap the two but partly: it meets docs/performance.md's six figures on an H100 within
        17 %, where the larger of the two is up to a third too fast. Never more than twice the larger.
        """
        _check_batch(sessions, tokens, context)
        total = sessions * tokens
        return self.reading_s(sessions, context) + self.computing_s(total, context) + self.exchanging_s(total)

    def batch_s(self, sessions: float, tokens: int, context: float) -> float:
        """The same through a service: with the host's time."""
        return self.forward_s(sessions, tokens, context) + self.host.batch_s + sessions * self.host.request_s

    def prefill_s(self, prompt: int, piece: int) -> float:
        """A prompt read in pieces, each a forward of its own (docs/cloud.md, "Batches")."""
        count(1, prompt=prompt, piece=piece)
        starts = range(0, prompt, piece)
        return math.fsum(self.forward_s(1, min(piece, prompt - at), at) + self.host.batch_s for at in starts)

    def slots(self, context: int) -> int:
        """Sessions whose KV caches of `context` positions fit beside the weights."""
        count(1, context=context)
        left = self.share * self.gpus * self.gpu.memory_bytes - self.target.weight_bytes
        return max(0, math.floor(left / (context * self.target.kv_bytes)))


def _check_batch(sessions: float, tokens: int, context: float) -> None:
    positive(sessions=sessions)
    count(1, tokens=tokens)
    at_least_zero(context=context)
