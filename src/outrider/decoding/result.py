"""The result of a generation: its tokens, the side that decided each, and the guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from outrider.config import GenerationSettings
from outrider.decoding.calibrated_gate import Calibrated, CalibrationFit, ModelIdentity
from outrider.decoding.gain import Gain
from outrider.decoding.gate import Gate
from outrider.decoding.options import DecodingOptions
from outrider.decoding.result_html import render_html
from outrider.decoding.risk_estimate import AuditTrail, RiskEstimator
from outrider.decoding.risk_estimate import Risk as Risk
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import FinishReason
from outrider.decoding.token_logprob import TokenLogprob

Guarantee = Literal["exact", "bounded", "best-effort", "edge-only"]

REPR_TOKENS = 20  # tokens in a result's repr


@dataclass
class Stats:
    """Counters of one generation. Token counters never count past the end of the output.

    drafted: drafted tokens, also those that were drafted ahead and dropped. verified: drafted tokens that a verdict
    decided. audited, disagreed: skipped tokens that the verifier compared, and those of them that it would have
    changed. near_ties: tokens of the output whose margin lay within the numeric noise of the verifier's number format
    (always 0 in float32). forced_by_audit: blocks that a calibrated gate would skip and that an audit verified.
    cloud_lost: the verifier became unreachable and the edge continued alone. prefill_s: the part of draft_s until the
    first drafted token. verify_prefill_s: the part of verify_s of the first verdict. Both include reading the prompt.
    edge_cached_tokens, cloud_cached_tokens: prompt tokens that drafter and verifier did not compute, because their KV
    caches of an earlier generation hold them.
    """

    rounds: int = 0
    blocks: int = 0
    escalated: int = 0
    forced_by_loop: int = 0
    forced_by_audit: int = 0
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
    edge_cached_tokens: int = 0
    cloud_cached_tokens: int = 0
    cloud_lost: bool = False
    bytes_up: int = 0
    bytes_down: int = 0
    media_bytes_up: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    draft_s: float = 0.0
    prefill_s: float = 0.0
    wait_s: float = 0.0
    queue_s: float = 0.0
    verify_s: float = 0.0
    verify_prefill_s: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ verified drafted tokens, or None if none was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def escalation_rate(self) -> float | None:
        """Verified blocks ÷ blocks, or None without blocks."""
        return self.escalated / self.blocks if self.blocks else None

    @property
    def cloud_share(self) -> float | None:
        """The cloud's tokens ÷ tokens, or None without tokens."""
        tokens = self.cloud_tokens + self.edge_tokens
        return self.cloud_tokens / tokens if tokens else None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again by the verifier, or by the drafter if no verdict was needed."""
        return self.cloud_cached_tokens if self.rounds else self.edge_cached_tokens

    def count_sources(self, sources: list[Source]) -> None:
        """Set the token counters from the source of each token of the output."""
        self.accepted = sources.count(Source.ACCEPTED)
        self.corrected = sources.count(Source.CORRECTION)
        self.bonus = sources.count(Source.BONUS)
        self.loop_sampled = sources.count(Source.SAMPLED)
        self.cloud_tokens = sum(source.by_cloud for source in sources)
        self.edge_tokens = len(sources) - self.cloud_tokens


TIME_FIELDS = tuple(each.name for each in fields(Stats) if each.name.endswith("_s"))


def derive_guarantee(stats: Stats, *, lossless: bool, bounded: bool = False) -> Guarantee:
    """Return the guarantee of an output, from the recorded decisions on its tokens.

    exact: lossless verdicts decided every token. bounded: the gate skipped the others within the budget of a
    calibration that fits this run, even if it skipped all. edge-only: the verifier decided no token, or was lost during
    the generation. best-effort: all other outputs.
    """
    if stats.cloud_lost:
        return "edge-only"
    if stats.edge_tokens and lossless and bounded:
        return "bounded"
    if stats.cloud_tokens == 0:
        return "edge-only"
    if stats.edge_tokens == 0 and lossless:
        return "exact"
    return "best-effort"


def wilson_interval(share: float, count: int, z: float) -> tuple[float, float]:
    """Return the score interval of a share of `count` trials, z standard deviations to each side (Wilson 1927)."""
    z2 = z * z / count
    middle, half = (share + z2 / 2) / (1 + z2), math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class GuaranteeReport:
    """The guarantee of a result, with its risk estimate and warnings."""

    guarantee: Guarantee
    risk: Risk | None = None
    warnings: tuple[str, ...] = ()


class GuaranteeTracker:
    """Derives the guarantees of one decoder's results, and accumulates the audits of a calibrated gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate if isinstance(gate, Calibrated) else None
        self._risk = RiskEstimator(gate.budget, gate.file.loss) if isinstance(gate, Calibrated) else None

    def report(
        self,
        stats: Stats,
        lossy: Seq[str],
        options: DecodingOptions,
        sides: Seq[ModelIdentity],
        settings: GenerationSettings,
        trail: AuditTrail,
    ) -> GuaranteeReport:
        """Return the report on one result. A result that lost the cloud does not count for the gate's risk.

        stats: with its sources counted. lossy: the reasons for lossy verdicts, empty if they are lossless. sides:
        drafter and verifier. trail: closed.
        """
        if self._gate is None or self._risk is None:
            return GuaranteeReport(derive_guarantee(stats, lossless=not lossy))
        fit = CalibrationFit()
        if not stats.cloud_lost:
            scope, loop_rule = options.scope, options.parsed_loop_rule
            fit = self._gate.check_fit(options.k, sides[0], sides[-1], settings, scope, loop_rule, lossy)
            self._risk.add(trail, stats.audited, stats.disagreed)
        level = derive_guarantee(stats, lossless=not lossy, bounded=fit.bounded)
        return GuaranteeReport(level, self._risk.risk, (*fit.warnings, *self._risk.warnings()))


def truncate_text(text: str, length: int) -> str:
    """Shorten a text to `length` characters, with an ellipsis at its end."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _format_percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.0f} %"


@dataclass(frozen=True)
class Result:
    """The answer to one prompt.

    token_ids: the generated tokens, with the EOS or the stop string. text: their decoding without special tokens and
    without an incomplete character at the end, or None if the model has no tokenizer. sources: the side that decided
    each token. near_ties: the indices into token_ids that `stats.near_ties` counts. ledger: bytes on the network by
    kind of frame, "up" and "down", which add up to stats.bytes_up and bytes_down. risk: the estimate for a calibrated
    gate, else None. pieces: the text of each token, which together make up `text`, or empty without a tokenizer.
    logprobs: the log-probability of each token and of the best ones at its position, if the setting `logprobs` requests
    them, from the target for verified tokens and else from the drafter.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    guarantee: Guarantee
    prompt_tokens: int
    stats: Stats
    sources: list[Source] = field(repr=False)
    near_ties: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    risk: Risk | None = None
    ledger: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)
    pieces: list[str] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        """Return one line: the guarantee, the end, the counts, and the beginning of the text."""
        preview = (
            f"{self.token_ids[:REPR_TOKENS]}" if self.text is None else repr(truncate_text(self.text, 4 * REPR_TOKENS))
        )
        notes = f", {len(self.warnings)} warnings" if self.warnings else ""
        end = f"{len(self.token_ids)} tokens, {self.finish_reason}, {self.stats.total_s:.2f} s"
        return f"Result({self.guarantee}, {end}{notes}: {preview})"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: what was gained, each token in the colour of its source, and the figures."""
        stats = self.stats
        rows = {
            "guarantee": self.guarantee,
            "ended by": self.finish_reason,
            "tokens": f"{len(self.token_ids):,}",
            "by the cloud": _format_percent(stats.cloud_share),
            "accepted drafts": _format_percent(stats.acceptance_rate),
            "blocks to the cloud": f"{stats.escalated} of {stats.blocks}",
            "seconds": f"{stats.total_s:.2f}",
        }
        return render_html(Gain.of([self]).describe(), self.visible_pieces, self.sources, rows, self.warnings)

    @property
    def visible_pieces(self) -> list[str]:
        """The text of each token, or its id and a space without a tokenizer."""
        return [f"{token} " for token in self.token_ids] if self.text is None else self.pieces

    def to_json(self) -> dict[str, object]:
        """Return a JSON-ready dictionary with the keys of docs/results.md."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("stats", "sources", "pieces")}
        stats = {name: round(v, 6) if isinstance(v, float) else v for name, v in asdict(self.stats).items()}
        risk = asdict(self.risk) if self.risk is not None else None
        sources, logprobs = [source.value for source in self.sources], [each.to_json() for each in self.logprobs]
        return {**out, "risk": risk, "stats": stats, "sources": sources, "logprobs": logprobs}
