"""What a generation came to: its tokens, who decided them, and the guarantee that they carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from outrider.core.sequence import Source
from outrider.core.stopping import Reason

Guarantee = Literal["exact", "bounded", "best-effort", "edge-only"]


@dataclass
class Stats:
    """Counters of one generation (DESIGN's vocabulary). Token counters never count past the end of the output.

    verified: drafted tokens that a verdict decided. audited / disagreed: skipped tokens that the verifier saw in
    passing, and how many it would have changed. near_ties: positions of the output whose choice lay within the
    numeric noise of the verifier's number format (always 0 in float32). drafted: also what was drafted ahead in vain.
    cloud_lost: the verifier could not be reached any more, and the edge went on alone.
    """

    rounds: int = 0
    blocks: int = 0
    escalated: int = 0
    forced_by_loop: int = 0
    loop_sampled: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    corrected: int = 0
    bonus: int = 0
    cloud_tokens: int = 0
    edge_tokens: int = 0
    audited: int = 0
    disagreed: int = 0
    near_ties: int = 0
    cloud_lost: bool = False
    bytes_up: int = 0
    bytes_down: int = 0
    media_bytes_up: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    draft_s: float = 0.0
    wait_s: float = 0.0
    queue_s: float = 0.0
    verify_s: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """accepted ÷ verified draft tokens; None where nothing was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def escalation_rate(self) -> float | None:
        """verified blocks ÷ blocks."""
        return self.escalated / self.blocks if self.blocks else None

    @property
    def cloud_share(self) -> float | None:
        """cloud tokens ÷ tokens."""
        tokens = self.cloud_tokens + self.edge_tokens
        return self.cloud_tokens / tokens if tokens else None

    def count_sources(self, sources: list[Source]) -> None:
        """Set the token counters from who decided each token of the output."""
        self.accepted = sources.count(Source.ACCEPTED)
        self.corrected = sources.count(Source.CORRECTION)
        self.bonus = sources.count(Source.BONUS)
        self.loop_sampled = sources.count(Source.SAMPLED)
        self.cloud_tokens = sum(source.by_cloud for source in sources)
        self.edge_tokens = len(sources) - self.cloud_tokens


def guarantee(stats: Stats, *, lossless: bool) -> Guarantee:
    """What the output is worth, judged by what was done and not by what was planned.

    exact: every token was decided by a lossless verdict. edge-only: the verifier decided none, or was lost on the way.
    Else best-effort.
    """
    if stats.cloud_tokens == 0 or stats.cloud_lost:
        return "edge-only"
    if stats.edge_tokens == 0 and lossless:
        return "exact"
    return "best-effort"


@dataclass(frozen=True)
class Result:
    """The answer to one prompt.

    token_ids holds generated tokens only, the EOS or the stop string included. text is their decoding without
    special tokens, None where the model came without a tokenizer. sources says who decided each token.
    near_ties lists the indices (into token_ids) that `stats.near_ties` counts. ledger: bytes on the network by kind of
    frame, "up" and "down"; their sums are stats.bytes_up and bytes_down.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: Reason
    guarantee: Guarantee
    prompt_tokens: int
    stats: Stats
    sources: list[Source] = field(repr=False)
    near_ties: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ledger: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary with DESIGN's keys."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("stats", "sources")}
        stats = {name: round(v, 6) if isinstance(v, float) else v for name, v in asdict(self.stats).items()}
        return {**out, "stats": stats, "sources": [source.value for source in self.sources]}
