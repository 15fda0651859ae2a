"""Cost of a round, of a verifier and of a fleet: the formulas of docs/design/maths.md ("Draft length", "Bytes"), and
the steady state of many sessions on one verifier.

α is the acceptance rate, k the block length and E(k) the expected number of tokens per round. Times are in seconds,
sizes in bytes. All values are means, so there is no tail latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.roofline import Server
from outrider.errors import SettingsError
from outrider.planning.costs import ID_BYTES
from outrider.planning.validation import at_least_zero, count, positive, share

MAX_BLOCK = 64  # the longest block length that `best_k` tries


def expected_tokens(acceptance: float, k: int) -> float:
    """Return E(k) = (1 − α^(k+1)) / (1 − α), the tokens per round if each draft is accepted with probability α.

    Leviathan et al. 2023 (arXiv 2211.17192), equation 1. k = 0 is cloud-only decoding and gives 1.

    Raises:
        SettingsError: α outside 0 to 1, or k below 0.
    """
    share(acceptance=acceptance)
    count(0, k=k)
    return math.fsum(acceptance**n for n in range(k + 1))


@dataclass(frozen=True)
class Network:
    """The network between one edge and the cloud. Bytes per second may be infinite."""

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
    """Bytes of one round with the headers of all counted layers: up_fixed + k · up_per_draft, and down."""

    up_fixed: float = 0.0
    up_per_draft: float = 0.0
    down: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero(**asdict(self))

    def up(self, k: int) -> float:
        """Return the bytes that a round with k drafts sends to the cloud."""
        return self.up_fixed + k * self.up_per_draft


@dataclass(frozen=True)
class Speculation:
    """The rounds of one edge. draft_s: time of one drafted token. verify_s(k): time of a verdict on k drafts.

    queue_s: wait before the verdict.
    """

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
        """Return the time from the drafted block to its verdict, without the round trip."""
        count(1, k=k)
        verify_s = self.verify_s(k)
        at_least_zero(verify_s=verify_s)
        net = self.network
        return self.size.up(k) / net.up_bytes_per_s + self.queue_s + verify_s + self.size.down / net.down_bytes_per_s

    def round_s(self, k: int) -> float:
        """Return k·t_d + S_up/B_up + RTT + t_queue + t_v(k) + S_dn/B_dn, a round of the sequential driver."""
        return k * self.draft_s + self.network.rtt_s + self.answer_s(k)

    def sequential_s(self, k: int) -> float:
        """Return the seconds per token, a round divided by E(k) ("Sequential latency per token")."""
        return self.round_s(k) / expected_tokens(self.acceptance, k)

    def pipelined_s(self, k: int) -> float:
        """Return t_d + (1 − α)(RTT + answer), the seconds per token of the pipelined driver ("Pipelined latency").

        It is a lower bound: a wrong draft also waits until its block is full and the previous request has arrived.
        It is at most `sequential_s` if k ≥ E(k). For smaller k the bonus token outweighs the hidden latency.
        """
        return self.draft_s + (1.0 - self.acceptance) * (self.network.rtt_s + self.answer_s(k))

    def best_k(self, longest: int = MAX_BLOCK) -> int:
        """Return the k from 1 to `longest` with the smallest `sequential_s` (maths.md has the closed form)."""
        count(1, longest=longest)
        return min(range(1, longest + 1), key=self.sequential_s)

    def breakeven_rtt_s(self, k: int, other_s: float) -> float:
        """Return the RTT at which `sequential_s` equals `other_s` per token. Below 0 it is slower at every RTT.

        other_s: t_v(1) of streamed cloud-only decoding, or the time of a model on the edge alone. With one t_v for a
        token and a block this is RTT < (E − 1)·t_v − k·t_d ("Cloud capacity").
        """
        positive(other_s=other_s)
        return expected_tokens(self.acceptance, k) * other_s - k * self.draft_s - self.answer_s(k)


# Many sessions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A request: tokens of the prompt and of the reply. chunk: tokens per prefill chunk."""

    prompt: int
    tokens: int
    chunk: int = 256

    def __post_init__(self) -> None:
        count(1, prompt=self.prompt, tokens=self.tokens, chunk=self.chunk)

    @property
    def context(self) -> int:
        """Return the number of positions at the end of the reply."""
        return self.prompt + self.tokens

    @property
    def mean_context(self) -> float:
        """Return the mean number of positions during the reply."""
        return self.prompt + self.tokens / 2


@dataclass(frozen=True)
class SteadyState:
    """A server under n sessions, in equilibrium.

    batch: sessions per step. busy: utilisation of the server. token_s: seconds per token of one session, including the
    edge and the network. prefill: share of a step's time spent on prompts.
    """

    sessions: int
    batch: float
    busy: float
    token_s: float
    prefill: float

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput of all sessions together."""
        return self.sessions / self.token_s

    @property
    def duty(self) -> float:
        """Return the share of the time that a session spends in a step. The rest is drafting, network and waiting."""
        return self.busy * self.batch / self.sessions


@dataclass(frozen=True)
class ServerLoadModel:
    """A closed queue of sessions at one server. k = 0 and think_s = 0 model cloud-only decoding.

    think_s: seconds between a verdict and the next request (k·t_d + RTT + bytes). A step batches all waiting requests.
    The prefill of a session is spread evenly over its rounds.
    """

    server: Server
    work: Workload
    acceptance: float
    k: int
    think_s: float

    def __post_init__(self) -> None:
        at_least_zero(think_s=self.think_s)
        if expected_tokens(self.acceptance, self.k) > self.work.tokens:
            raise SettingsError(f"a round of k = {self.k} is longer than a reply of {self.work.tokens} tokens")

    @property
    def round_tokens(self) -> float:
        """Return the expected tokens per round."""
        return expected_tokens(self.acceptance, self.k)

    @property
    def round_prefill_s(self) -> float:
        """Return the prefill time of a session per round."""
        return self.server.prefill_s(self.work.prompt, self.work.chunk) * self.round_tokens / self.work.tokens

    def step_s(self, batch: float) -> float:
        """Return the time of one step with `batch` sessions."""
        return self.server.batch_s(batch, self.k + 1, self.work.mean_context) + batch * self.round_prefill_s

    def steady_state(self, sessions: int) -> SteadyState:
        """Return the mean-field equilibrium of a closed queue whose server batches all waiting requests.

        x = n·t(b) / (think + t(b) + u·t(b)/2) requests arrive during a step, b = max(1, x), u = min(1, x). With
        probability u a request arrives during a step and waits for half of it. Cloud-only sessions never wait.
        """
        count(1, sessions=sessions)
        arrivals = (
            float(sessions) if self.think_s == 0 else _find_root(lambda x: self._arrivals(sessions, x) - x, sessions)
        )
        batch, busy = max(1.0, arrivals), min(1.0, arrivals)
        step = self.step_s(batch)
        token_s = self._cycle_s(step, busy) / self.round_tokens
        return SteadyState(sessions, batch, busy, token_s, batch * self.round_prefill_s / step)

    def max_sessions(self, limit_s: float) -> int:
        """Return the largest number of sessions that fit in memory with a mean of at most `limit_s` per token."""
        positive(limit_s=limit_s)
        low, high = 0, self.server.slots(self.work.context)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.steady_state(middle).token_s <= limit_s else (low, middle - 1)
        return low

    def _arrivals(self, sessions: int, guess: float) -> float:
        step = self.step_s(max(1.0, guess))
        return sessions * step / self._cycle_s(step, min(1.0, guess))

    def _cycle_s(self, step_s: float, busy: float) -> float:
        waiting = busy * step_s / 2 if self.think_s > 0 else 0.0
        return self.think_s + waiting + step_s


def servers_for(edges: int, active: float, max_sessions: int, spare: float = 0.0) -> int:
    """Return the servers for `edges` edges, a share `active` of them generating, with a share `spare` kept free.

    Raises:
        SettingsError: `max_sessions` is 0, or a share is outside 0 to 1.
    """
    count(1, edges=edges)
    share(active=active, spare=spare)
    if max_sessions < 1 or spare == 1:
        raise SettingsError("no number of servers is enough: a server cannot keep a single session within the limit")
    return math.ceil(round(edges * active / (max_sessions * (1.0 - spare)), 9))  # a rounding error adds no server


def traffic_bytes_per_s(model: ServerLoadModel, size: RoundBytes, token_s: float) -> tuple[float, float]:
    """Return bytes per second up and down of a session that generates all the time. Up includes its prompts' ids.

    token_s: seconds per token.
    """
    positive(token_s=token_s)
    round_s = model.round_tokens * token_s
    prompts = ID_BYTES * model.work.prompt / (model.work.tokens * token_s)
    return size.up(model.k) / round_s + prompts, size.down / round_s


def dollars_per_million(gpu_hour: float, gpus: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens on `gpus` GPUs, from the price per GPU hour and the throughput."""
    at_least_zero(gpu_hour=gpu_hour)
    positive(gpus=gpus, tokens_per_s=tokens_per_s)
    return gpu_hour / 3600 * gpus / tokens_per_s * 1e6


def _find_root(function: Callable[[float], float], high: float) -> float:
    """Return the root of a function that is positive at 0 and crosses 0 once below `high`, by bisection."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high
