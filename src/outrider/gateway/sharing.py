"""One engine, many threads: whoever has the turn reads for everybody who waits.

A caller puts its feed on the list. If nobody has the turn, it takes it; else it waits until its feed was read by
somebody else, or until the turn is handed to it, as the one who has waited longest. Who has the turn reads its own
feed, and in the same forward whatever on the list fits with it. So nobody is passed over, there is no extra thread,
and where there is one caller only, it pays for two uncontended locks.

Long prompts are read a chunk at a time, each with a turn of its own: short steps come in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar, cast

from torch import Tensor

from outrider.core.actions import Proposal
from outrider.core.policy import Policy
from outrider.core.sampling import Pick
from outrider.engines.base import CHUNK, Chooser, Engine, Feed, Prompt, check_feeds, check_truncation, read_many
from outrider.errors import StateError

T = TypeVar("T")

NARROW = 16  # tokens; padding up to here costs less than a second forward
MOST = 64  # feeds in one forward


class _Ask:
    """What a caller waits for: something to be done, alone."""

    answer: Any
    width = 0
    alone = True

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do
        self._leads = False
        self._told = threading.Lock()
        self._told.acquire()

    def lead(self) -> None:
        """It is the caller's turn."""
        self._leads = True
        self._told.release()

    def give(self, answer: Any) -> None:
        self.answer, self._leads = answer, False
        self._told.release()

    def leads(self) -> bool:
        """Wait. True: it is this caller's turn. False: the answer is there."""
        self._told.acquire()
        return self._leads


class _Read(_Ask):
    """A feed to be read, together with others' unless that failed; with a policy, for what that chooses."""

    alone = False

    def __init__(self, feed: Feed, policy: Policy | None, do: Callable[[], Any]) -> None:
        super().__init__(do)
        self.feed, self.policy, self.width = feed, policy, len(feed.ids)


class SharedEngine:
    """An `Engine`, and a `Chooser` if the engine is one, that any number of worker threads use at once.

    A slot is one thread's at a time. `truncate` and `kv_len` never wait: a slot is rolled back when it is next read.
    Whatever else the engine has is passed through, unguarded.
    """

    serves_threads = True  # a decoder then takes generations of several threads at once

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # of the list, and of whether somebody has the turn
        self._waiting: list[_Ask] = []
        self._busy = False
        self._lengths: dict[int, int] = {}  # of the open slots, as their owners left them

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # Slots --------------------------------------------------------------------------------------------------

    def open(self, prompt: Prompt) -> int:
        slot: int = self._ask(_Ask(lambda: self._engine.open(prompt)))
        self._lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        self.kv_len(slot)
        del self._lengths[slot]
        self._ask(_Ask(lambda: self._engine.close(slot)))

    def kv_len(self, slot: int) -> int:
        if slot not in self._lengths:
            raise StateError(f"slot {slot} is not open")
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        check_truncation(slot, length, self.kv_len(slot))
        self._lengths[slot] = length

    # Reading ------------------------------------------------------------------------------------------------

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        return cast(Tensor, self._read(Feed(slot, ids, len(ids) if rows is None else rows)))

    def forward_many(self, feeds: Seq[Feed]) -> list[Tensor]:
        """One after another: it is the feeds of different threads that are read together."""
        check_feeds(feeds)
        return [cast(Tensor, self._read(feed)) for feed in feeds]

    def choose_many(self, feeds: Seq[Feed], policies: Seq[Policy]) -> list[list[Pick]]:
        check_feeds(feeds)
        return [cast("list[Pick]", self._read(feed, policy)) for feed, policy in zip(feeds, policies, strict=True)]

    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, sure: bool) -> list[Proposal]:
        """A turn of its own: on a device, a block is drafted as one."""
        rest, engine = self._read_on(Feed(slot, ids, 1)), cast(Chooser, self._engine)

        def draft() -> list[Proposal]:
            self._settle(slot)
            drafted = engine.draft(slot, rest.ids, count, policy, sure=sure)
            self._lengths[slot] = engine.kv_len(slot)
            return drafted

        return cast("list[Proposal]", self._ask(_Ask(draft)))

    def _read(self, feed: Feed, policy: Policy | None = None) -> Any:
        """A feed's rows, or what the policy chooses from them. Where it fails, the slot is as it was."""
        check_feeds([feed])
        before = self.kv_len(feed.slot)
        try:
            return self._ask(self._reading(self._read_on(feed), policy))
        except BaseException:
            self._lengths[feed.slot] = before
            raise

    def _read_on(self, feed: Feed) -> Feed:
        """Read a long feed up to its last part, which has all the rows that are wanted; that is returned."""
        ids = feed.ids
        while (spare := len(ids) - max(CHUNK, feed.rows)) > 0:
            part = min(CHUNK, spare)
            self._ask(self._reading(Feed(feed.slot, ids[:part], 1), None))
            ids = ids[part:]
        return Feed(feed.slot, ids, feed.rows)

    def _reading(self, feed: Feed, policy: Policy | None) -> _Read:
        ask = _Read(feed, policy, lambda: self._read_all([ask])[0])
        return ask

    def _read_all(self, asks: Seq[_Read]) -> Seq[Any]:
        feeds = [ask.feed for ask in asks]
        for feed in feeds:
            self._settle(feed.slot)
        if any(ask.policy is not None for ask in asks):
            rows: Seq[Any] = read_many(self._engine, feeds, [ask.policy for ask in asks])
        else:
            rows = self._engine.forward_many(feeds)
        for feed in feeds:
            self._lengths[feed.slot] += len(feed.ids)
        return rows

    def _settle(self, slot: int) -> None:
        """Roll the engine's slot back to where its owner left it, or to before what failed."""
        length = self._lengths[slot]
        if self._engine.kv_len(slot) > length:
            self._engine.truncate(slot, length)

    # Turns --------------------------------------------------------------------------------------------------

    def _ask(self, ask: _Ask) -> Any:
        with self._lock:
            waits, self._busy = self._busy, True
            if waits:
                self._waiting.append(ask)
        if not waits:  # nor does anybody else
            return self._alone(ask)
        while ask.leads():
            self._take_turn()
        return ask.answer

    def _alone(self, ask: _Ask) -> Any:
        try:
            return ask.do()
        finally:
            self._hand_on()

    def _take_turn(self) -> None:
        """Serve the one who has waited longest, whose thread this is, and those whose feeds fit with it."""
        group = self._oldest()
        if len(group) == 1:
            group[0].give(self._alone(group[0]))
            return
        try:
            self._serve_all(group)
        finally:
            self._hand_on()

    def _serve_all(self, group: list[_Read]) -> None:
        try:
            answers = self._read_all(group)
        except Exception:  # noqa: BLE001 - whatever it was: each leads a turn of its own, and has its own error there
            self._separate(group)
        else:
            for ask, answer in zip(group, answers, strict=True):
                ask.give(answer)

    def _oldest(self) -> list[Any]:
        """Taken from the list. No feed is padded to more than twice its width, or NARROW tokens."""
        with self._lock:
            first, rest = self._waiting[0], self._waiting[1:]
            group, total, low, high = [first], first.width, first.width, first.width
            for ask in rest if not first.alone else ():
                lower, higher = min(low, ask.width), max(high, ask.width)
                fits = higher <= max(NARROW, 2 * lower) and total + ask.width <= CHUNK and len(group) < MOST
                if fits and not ask.alone:
                    group.append(ask)
                    total, low, high = total + ask.width, lower, higher
            taken = set(group)
            self._waiting = [ask for ask in rest if ask not in taken]
        return group

    def _separate(self, group: Seq[_Read]) -> None:
        with self._lock:
            for ask in group:
                ask.alone = True
            self._waiting = [*group, *self._waiting]

    def _hand_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting[0].lead()
            else:
                self._busy = False
