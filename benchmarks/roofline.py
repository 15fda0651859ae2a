"""Time of a verifier's forward pass, and the number of sessions in its memory. Times in seconds, sizes in bytes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from outrider.planning.validation import at_least_zero, count, positive, share


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory, bandwidth, peak rate, and the links to other GPUs of the host.

    link_latency_s: time of an all-reduce of a few bytes. link_bytes_per_s: rate in one direction. A single GPU uses
    neither.
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
    """The target model. `flops` is per token, `attention_flops` and `kv_bytes` are per position of the context."""

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
        """Return a decoder with gated feed-forward layers and untied embeddings, in bfloat16 (2 bytes per number).

        Each weight but the input embedding takes 2 floating-point operations per token. Attention takes 4 per position
        and query component (scores and weighted values).
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
    """CPU time that a service adds to a forward pass, per batch and per request in the batch."""

    batch_s: float = 0.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero(**asdict(self))


@dataclass(frozen=True)
class Server:
    """One replica of a target over `gpus` GPUs (tensor parallel). share: usable share of the memory."""

    target: Target
    gpu: Gpu
    gpus: int = 1
    host: Host = Host()
    share: float = 0.9

    def __post_init__(self) -> None:
        count(1, gpus=self.gpus)
        share(share=self.share)

    def reading_s(self, sessions: float, context: float) -> float:
        """Return the time to read all weights once and the KV cache of each session."""
        size = self.target.weight_bytes + sessions * context * self.target.kv_bytes
        return size / (self.gpus * self.gpu.bytes_per_s)

    def computing_s(self, tokens: float, context: float) -> float:
        """Return the time to compute `tokens` tokens at the peak rate."""
        return tokens * (self.target.flops + context * self.target.attention_flops) / (self.gpus * self.gpu.flops_per_s)

    def exchanging_s(self, tokens: float) -> float:
        """Return the time of two ring all-reduces per layer of [tokens, hidden] bfloat16. It is 0 on one GPU.

        Each sends 2·(g − 1)/g of the data over every GPU's link (Megatron-LM, arXiv 1909.08053).
        """
        if self.gpus == 1:
            return 0.0
        sent = 2 * (self.gpus - 1) / self.gpus * tokens * self.target.hidden * 2.0
        return 2 * self.target.layers * (self.gpu.link_latency_s + sent / self.gpu.link_bytes_per_s)

    def forward_s(self, sessions: float, tokens: int, context: float) -> float:
        """Estimate a forward pass of `tokens` tokens per session: reading plus computing plus all-reduces.

        The roofline (Williams et al. 2009) is the maximum of reading and computing. The sum fits better, because
        kernels overlap the two only in part: it meets the six figures of docs/performance.md on an H100 within 17 %,
        and the maximum is up to a third too fast.
        """
        positive(sessions=sessions)
        count(1, tokens=tokens)
        at_least_zero(context=context)
        total = sessions * tokens
        return self.reading_s(sessions, context) + self.computing_s(total, context) + self.exchanging_s(total)

    def batch_s(self, sessions: float, tokens: int, context: float) -> float:
        """Estimate the same pass in a service, with the host's time."""
        return self.forward_s(sessions, tokens, context) + self.host.batch_s + sessions * self.host.request_s

    def prefill_s(self, prompt: int, chunk: int) -> float:
        """Estimate a chunked prefill with one forward pass per chunk (docs/cloud.md, "Batches")."""
        count(1, prompt=prompt, chunk=chunk)
        starts = range(0, prompt, chunk)
        return math.fsum(self.forward_s(1, min(chunk, prompt - at), at) + self.host.batch_s for at in starts)

    def slots(self, context: int) -> int:
        """Return the number of sessions whose KV caches of `context` positions fit beside the weights."""
        count(1, context=context)
        left = self.share * self.gpus * self.gpu.memory_bytes - self.target.weight_bytes
        return max(0, math.floor(left / (context * self.target.kv_bytes)))
