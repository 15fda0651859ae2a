"""What a round, a verifier and a fleet cost: the formulas of MATHS.md ("How long to draft", "Bytes"), and
a balance of many sessions on one verifier.

α is the acceptance rate, k the block length, E(k) the tokens that a round brings. Times are seconds, sizes bytes. Mean
values throughout: nothing here says how long the slowest round takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from outrider.errors import SettingsError
from outrider.planning.roofline import Server
from outrider.planning.validation import at_least_zero, count, positive, share

MAX_BLOCK = 64  # block length up to which the best is sought
ID_BYTES = 3  # one id of a vocabulary below 2^21, on the wire (MATHS, "Bytes")


def expected_tokens(acceptance: float, k: int) -> float:
    """E(k) = (1 − α^(k+1)) / (1 − α), tokens per round where every draft is accepted with chance α.

    MATHS, "How long to draft"; Leviathan et al. 2023 (arXiv 2211.17192), equation 1. k = 0, cloud-only, gives 1.

    Raises:
        SettingsError: α outside 0 to 1, or k below 0.
    """
    share(acceptance=acceptance)
    count(0, k=k)
    return math.fsum(acceptance**n for n in range(k + 1))


@dataclass(frozen=True)
class Network:
    """Between one edge and the cloud. Bytes per second may be infinite."""

    rtt_s: float
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        at_least_zero(rtt_s=self.rtt_s)
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            if getattr(self, name) != math.inf:
                positive(**{name: getattr(self, name)})


@dataclass(frozen=True)
class RoundBytes:
    """Bytes of one round, all layers down to the wire that are to be counted: up_fixed + k · up_per_draft, and down."""

    up_fixed: float = 0.0
    up_per_draft: float = 0.0
    down: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero(**asdict(self))

    def up(self, k: int) -> float:
        return self.up_fixed + k * self.up_per_draft


@dataclass(frozen=True)
class Speculation:
    """One edge's rounds. draft_s: of one drafted token; verify_s(k): of a verdict on k drafts; queue_s: before it."""

    acceptance: float
    draft_s: float
    verify_s: Callable[[int], float]
    network: Network
    size: RoundBytes = RoundBytes()
    queue_s: float = 0.0

    def __post_init__(self) -> None:
        share(acceptance=self.acceptance)
        at_least_zero(draft_s=self.draft_s, queue_s=self.queue_s)

    def answer_s(self, k: int) -> float:
        """From the block that is drafted to its verdict, the round trip left out (MATHS: all but k·t_d and RTT)."""
        count(1, k=k)
        verify_s = self.verify_s(k)
        at_least_zero(verify_s=verify_s)
        net = self.network
        return self.size.up(k) / net.up_bytes_per_s + self.queue_s + verify_s + self.size.down / net.down_bytes_per_s

    def round_s(self, k: int) -> float:
        """k·t_d + S_up/B_up + RTT + t_queue + t_v(k) + S_dn/B_dn, a round of the sequential driver."""
        return k * self.draft_s + self.network.rtt_s + self.answer_s(k)

    def sequential_s(self, k: int) -> float:
        """Seconds per token: a round divided by E(k) (MATHS, "Latency per token, sequential")."""
        return self.round_s(k) / expected_tokens(self.acceptance, k)

    def pipelined_s(self, k: int) -> float:
        """Seconds per token while drafting goes on: t_d + (1 − α)(RTT + answer) (MATHS, "Pipelined").

        A floor: it leaves out that a wrong draft waits for its block to fill and for the request before it to land.
        At most `sequential_s` where k ≥ E(k); below that a round's free token outweighs what pipelining hides.
        """
        return self.draft_s + (1.0 - self.acceptance) * (self.network.rtt_s + self.answer_s(k))

    def best_k(self, longest: int = MAX_BLOCK) -> int:
        """The k from 1 to `longest` with the least `sequential_s` (MATHS has the closed form, by Lambert's W)."""
        count(1, longest=longest)
        return min(range(1, longest + 1), key=self.sequential_s)

    def duty(self, k: int) -> float:
        """Share of a round in which the verifier works for this session: t_v / round.

        Its inverse, without RTT and bytes 1 + k·t_d/t_v, is how many such sessions keep a verifier busy that reads one
        block at a time (MATHS, "Its durable gain is cloud capacity").
        """
        return self.verify_s(k) / self.round_s(k)

    def breakeven_rtt_s(self, k: int, other_s: float) -> float:
        """The RTT at which `sequential_s` equals `other_s` per token; below 0: slower even without a network.

        other_s: cloud-only streaming's t_v(1), or a model's on the edge alone. MATHS: RTT < (E − 1)·t_v − k·t_d, where
        t_v is that of a token and of a block alike.
        """
        positive(other_s=other_s)
        return expected_tokens(self.acceptance, k) * other_s - k * self.draft_s - self.answer_s(k)

    def breakeven_rtt_pipelined_s(self, k: int, other_s: float) -> float:
        """The RTT at which `pipelined_s` equals `other_s`; infinite with α = 1 and a drafter that is faster."""
        positive(other_s=other_s)
        spare = other_s - self.draft_s
        if self.acceptance == 1.0:
            return math.copysign(math.inf, spare)
        return spare / (1.0 - self.acceptance) - self.answer_s(k)


# Many sessions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A reply: what the prompt and the answer have in tokens, and how the prompt is read."""

    prompt: int
    tokens: int
    piece: int = 256

    def __post_init__(self) -> None:
        count(1, prompt=self.prompt, tokens=self.tokens, piece=self.piece)

    @property
    def context(self) -> int:
        """Positions at the end."""
        return self.prompt + self.tokens

    @property
    def mean_context(self) -> float:
        return self.prompt + self.tokens / 2


@dataclass(frozen=True)
class Load:
    """A server under n sessions.

    batch: sessions in a step; busy: share of the time that it works; token_s: per token and session, what the edge and
    the network take included; prefill: share of a step's time that goes into prompts.
    """

    sessions: int
    batch: float
    busy: float
    token_s: float
    prefill: float

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together."""
        return self.sessions / self.token_s

    @property
    def duty(self) -> float:
        """Share of the time that a session is in a step: the rest it drafts, travels or waits."""
        return self.busy * self.batch / self.sessions


@dataclass(frozen=True)
class ServerLoadModel:
    """A server and the sessions that come to it, think, and come again. k = 0 and think_s = 0: cloud-only.

    think_s: seconds between a verdict and the next request (k·t_d + RTT + bytes). A step reads all that wait, and of
    new
    prompts as much as there are new replies: a session's rounds share out its prefill evenly.
    """

    server: Server
    work: Work
    acceptance: float
    k: int
    think_s: float

    def __post_init__(self) -> None:
        at_least_zero(think_s=self.think_s)
        if expected_tokens(self.acceptance, self.k) > self.work.tokens:
            raise SettingsError(f"a round of k = {self.k} is longer than a reply of {self.work.tokens} tokens")

    @property
    def round_tokens(self) -> float:
        return expected_tokens(self.acceptance, self.k)

    @property
    def round_prefill_s(self) -> float:
        """A session's prefill over its rounds."""
        return self.server.prefill_s(self.work.prompt, self.work.piece) * self.round_tokens / self.work.tokens

    def step_s(self, batch: float) -> float:
        return self.server.batch_s(batch, self.k + 1, self.work.mean_context) + batch * self.round_prefill_s

    def load(self, sessions: int) -> Load:
        """The mean-field balance of a closed queue with one server that takes all who wait at once.

        x = n·t(b) / (away + t(b) + u·t(b)/2) arrivals during a step, b = max(1, x), u = min(1, x): who comes while the
        server works, with chance u, waits for half a step. Cloud-only sessions are never away, and wait for nobody.
        """
        count(1, sessions=sessions)
        arrivals = (
            float(sessions) if self.think_s == 0 else _find_root(lambda x: self._arrivals(sessions, x) - x, sessions)
        )
        batch, busy = max(1.0, arrivals), min(1.0, arrivals)
        step = self.step_s(batch)
        token_s = self._cycle_s(step, busy) / self.round_tokens
        return Load(sessions, batch, busy, token_s, batch * self.round_prefill_s / step)

    def max_sessions(self, limit_s: float) -> int:
        """The most sessions with at most `limit_s` per token on average, and memory for each; 0 if there are none."""
        positive(limit_s=limit_s)
        low, high = 0, self.server.slots(self.work.context)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.load(middle).token_s <= limit_s else (low, middle - 1)
        return low

    def _arrivals(self, sessions: int, guess: float) -> float:
        step = self.step_s(max(1.0, guess))
        return sessions * step / self._cycle_s(step, min(1.0, guess))

    def _cycle_s(self, step_s: float, busy: float) -> float:
        waiting = busy * step_s / 2 if self.think_s > 0 else 0.0
        return self.think_s + waiting + step_s


def servers_for(edges: int, active: float, max_sessions: int, spare: float = 0.0) -> int:
    """Servers for `edges` edges of which a share `active` is generating, with a share `spare` of each kept free.

    Raises:
        SettingsError: no session meets the limit (`max_sessions` is 0), or a share outside 0 to 1.
    """
    count(1, edges=edges)
    share(active=active, spare=spare)
    if max_sessions < 1 or spare == 1:
        raise SettingsError("no number of servers is enough: not one session is within the limit on any")
    return math.ceil(round(edges * active / (max_sessions * (1.0 - spare)), 9))  # not one more for the last bit


def traffic_bytes_per_s(
    model: ServerLoadModel, size: RoundBytes, token_s: float, opening: float = 0.0
) -> tuple[float, float]:
    """Up and down, of one session that generates all the time: its rounds, and up its prompts' ids and `opening` bytes.

    token_s: seconds per token. MATHS, "Bytes".
    """
    positive(token_s=token_s)
    at_least_zero(opening=opening)
    round_s, reply_s = model.round_tokens * token_s, model.work.tokens * token_s
    first = opening + ID_BYTES * model.work.prompt
    return size.up(model.k) / round_s + first / reply_s, size.down / round_s


def dollars_per_million(gpu_hour: float, gpus: float, tokens_per_s: float) -> float:
    """Of a million tokens, from `gpus` GPUs at a price per hour that bring so many tokens per second."""
    at_least_zero(gpu_hour=gpu_hour)
    positive(gpus=gpus, tokens_per_s=tokens_per_s)
    return gpu_hour / 3600 * gpus / tokens_per_s * 1e6


def _find_root(function: Callable[[float], float], high: float) -> float:
    """Where a function that is positive at 0 and crosses 0 once up to `high` does so."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high
