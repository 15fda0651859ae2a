"""Decoders by what requests choose, and verifiers by the network that lies between."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from outrider.api import SpeculativeDecoder
from outrider.config import DriverName, OnCloudLoss, OnLoop, Privacy, Scope, check_choice
from outrider.core.acceptance import rule
from outrider.core.gate import gate
from outrider.core.lookahead import lookahead
from outrider.core.loops import DEFAULT_LOOP_RULE
from outrider.core.modes import check_modes
from outrider.engines.base import Engine
from outrider.errors import CloudError, SettingsError
from outrider.gateway.sharing import SharedEngine
from outrider.netem.conditions import conditions
from outrider.verifiers.base import Distant, Verifier, disconnect
from outrider.verifiers.local import LocalVerifier

Way = Literal["speculative", "edge-only", "cloud-only"]

CUT = "cut"
MOST_DECODERS = 64
MOST_NETWORKS = 8


@dataclass(frozen=True)
class Choice:
    """How one request is decoded. net: an emulated network ("none", "rtt=50ms,bw=2Mbit", or "cut": no cloud can be
    reached). watch: tell how sure the drafter was of each token. The rest are `SpeculativeDecoder`'s arguments."""

    way: Way = "speculative"
    gate: str = "always"
    k: int | str = 5
    accept: str = "exact"
    scope: Scope = "block"
    on_loop: OnLoop | None = None
    loop_rule: str = DEFAULT_LOOP_RULE
    driver: DriverName = "sequential"
    on_cloud_loss: OnCloudLoss | None = None
    privacy: Privacy = "audio"
    net: str = "none"
    watch: bool = False

    def settled(self) -> Choice:
        """The same, without what does not matter for its way: the gate of edge-only decoding, for example.

        Raises:
            SettingsError: a way or a network that there is not.
        """
        check_choice("way", self.way, Way)
        if self.way == "edge-only":
            on_loop = None if self.on_loop == "escalate" else self.on_loop
            return Choice(self.way, k=self.k, on_loop=on_loop, loop_rule=self.loop_rule, watch=self.watch)
        net = self.net if self.net == CUT else str(conditions(self.net))
        if self.way == "speculative":
            return replace(self, net=net)
        on_loss: OnCloudLoss | None = None if self.on_cloud_loss == "edge-only" else self.on_cloud_loss
        kept = {"on_loop": self.on_loop, "loop_rule": self.loop_rule, "privacy": self.privacy}
        return Choice(self.way, **kept, on_cloud_loss=on_loss, net=net)  # type: ignore[arg-type]


@runtime_checkable
class Cuttable(Distant, Protocol):
    """A verifier that can be cut off, to see what comes of that."""

    def cut(self) -> None:
        """From now on nothing gets through, and nobody waits long for it."""
        ...


@dataclass
class _Network:
    """A verifier, and how many generations are with it."""

    verifier: Verifier
    users: int = 0


class Pool:
    """Decoders on one engine, kept for as long as they are among the last ones used; the same for verifiers.

    engine: drafts, and writes all prompts. cloud: a verifier behind the emulated network that the text names ("none"
    for none); None where there is no cloud.
    """

    def __init__(self, engine: Engine, cloud: Callable[[str], Verifier] | None) -> None:
        self.engine = engine if isinstance(engine, SharedEngine) else SharedEngine(engine)
        self._cloud = cloud
        self._lock = threading.RLock()
        self._decoders: OrderedDict[Choice, SpeculativeDecoder] = OrderedDict()
        self._networks: OrderedDict[str, _Network] = OrderedDict()
        self._kept: set[Choice] = set()  # unwatched

    def decoder(self, choice: Choice) -> SpeculativeDecoder:
        """The decoder. It has not spoken to a cloud yet, if nobody has used it.

        Raises:
            SettingsError: what is chosen contradicts itself, or cannot be had here.
        """
        with self._lock:
            choice = choice.settled()
            found = self._decoders.get(choice)
            if found is None:
                found = self._decoders[choice] = self._build(choice)
                self._share(choice, found)
            self._decoders.move_to_end(choice)
            if choice.way != "edge-only":
                self._networks.move_to_end(choice.net)
            others = [each for each in self._decoders if not self._keeps(each)]
            for old in others[: max(0, len(self._decoders) - MOST_DECODERS)]:
                del self._decoders[old]
            return found

    def keep(self, choice: Choice) -> SpeculativeDecoder:
        """`decoder`, which then stays, and its verifier with it, whatever others ask for."""
        with self._lock:
            self._kept.add(replace(choice.settled(), watch=False))
            return self.decoder(choice)

    @property
    def cuttable(self) -> bool:
        """Whether net "cut" can be had, as far as can be told by the verifiers that there are."""
        with self._lock:
            return any(isinstance(network.verifier, Cuttable) for network in self._networks.values())

    @contextmanager
    def lent(self, choice: Choice) -> Iterator[SpeculativeDecoder]:
        """`decoder`, and until the end its verifier stays connected."""
        network = None
        try:
            with self._lock:
                decoder, network = self.decoder(choice), self._networks.get(choice.settled().net)
                if network is not None:
                    network.users += 1
            yield decoder
        finally:
            with self._lock:
                if network is not None:
                    network.users -= 1
                left = self._spare()
            _disconnect(left)

    def close(self) -> None:
        """Disconnect all verifiers. Nothing may be running."""
        with self._lock:
            left = [network.verifier for network in self._networks.values()]
            self._networks.clear()
            self._decoders.clear()
        _disconnect(left)

    # Building -----------------------------------------------------------------------------------------------

    def _build(self, choice: Choice) -> SpeculativeDecoder:
        options: dict[str, Any] = {
            "on_loop": choice.on_loop,
            "loop_rule": choice.loop_rule,
            "watch": choice.watch,
            "lazy": True,
        }
        if choice.way == "edge-only":
            return SpeculativeDecoder(self.engine, k=choice.k, **options)
        self._check(choice)
        verifier = self._verifier(choice.net)
        options |= {"on_cloud_loss": choice.on_cloud_loss, "privacy": choice.privacy}
        if choice.way == "cloud-only":
            return SpeculativeDecoder(None, verifier, reader=self.engine, **options)
        options |= {"gate": choice.gate, "accept": choice.accept, "scope": choice.scope, "driver": choice.driver}
        return SpeculativeDecoder(self.engine, verifier, k=choice.k, **options)

    def _check(self, choice: Choice) -> None:
        """What can be refused before a cloud is reached for: whatever does not depend on what kind of cloud it is."""
        if self._cloud is None:
            raise SettingsError("there is no cloud here: the only way is edge-only")
        if choice.net == CUT and choice.on_cloud_loss == "wait":
            raise SettingsError("net 'cut' with on_cloud_loss 'wait' would wait for ever")
        check_modes(
            gate(choice.gate),
            rule(choice.accept),
            choice.scope,
            choice.on_loop,
            choice.driver,
            choice.on_cloud_loss,
            choice.privacy,
            has_drafter=choice.way == "speculative",
            has_verifier=True,
            remote=True,
        )
        lookahead(choice.k)

    def _share(self, choice: Choice, built: SpeculativeDecoder) -> None:
        """Audits, and what k auto has learnt, are a choice's, watched or not."""
        twin = self._decoders.get(replace(choice, watch=not choice.watch))
        if twin is not None:
            built.learn_with(twin)

    def _keeps(self, choice: Choice) -> bool:
        return replace(choice, watch=False) in self._kept

    def _verifier(self, net: str) -> Verifier:
        assert self._cloud is not None  # it was checked
        if net not in self._networks:
            self._networks[net] = _Network(self._reach(net, self._cloud))
        return self._networks[net].verifier

    def _reach(self, net: str, cloud: Callable[[str], Verifier]) -> Verifier:
        verifier = cloud("none" if net == CUT else net)
        if isinstance(verifier, LocalVerifier) and net != "none":
            raise SettingsError(f"net {net!r}: the cloud is in this process, and there is no network in between")
        if isinstance(verifier, LocalVerifier) and not isinstance(verifier.engine, SharedEngine):
            return LocalVerifier(SharedEngine(verifier.engine))
        if net == CUT:
            if not isinstance(verifier, Cuttable):
                _disconnect([verifier])
                raise SettingsError("net 'cut': this verifier cannot be cut off")
            verifier.cut()
        return verifier

    def _spare(self) -> list[Verifier]:
        """Take out the verifiers that have not been used for longest, as far as there are too many, and nobody uses
        them now."""
        kept = {choice.net for choice in self._kept}
        idle = [net for net, network in self._networks.items() if not network.users and net not in kept]
        spare = idle[: max(0, len(self._networks) - MOST_NETWORKS)]
        for choice in [choice for choice in self._decoders if choice.way != "edge-only" and choice.net in spare]:
            del self._decoders[choice]
        return [self._networks.pop(net).verifier for net in spare]


def _disconnect(verifiers: list[Verifier]) -> None:
    for verifier in verifiers:
        with suppress(CloudError):  # it may be gone already
            disconnect(verifier)
