"""The cloud of `outrider edge`: its address, its own process if it is local, and its state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from outrider.cli.options import Models, Network
from outrider.errors import ModelError

if TYPE_CHECKING:
    from outrider.cli.subprocess_cloud import SupervisedCloud
    from outrider.engines.base import Engine
    from outrider.engines.prompt_lookup import PromptLookup
    from outrider.verifiers.base import Verifier

    VerifierFactory = Callable[[str], Verifier]

CLOUD_TIMEOUT_S = 30.0  # limit of the first connection attempt, after which requests are served without the cloud
log = logging.getLogger("outrider.gateway")


class CloudConnection:
    """The address of the cloud, and connections to it. own: the gateway's own cloud process, if there is one."""

    def __init__(self, models: Models, network: Network) -> None:
        from outrider.verifiers.connect import parse_cloud_address

        self._address, self._options = models.cloud, network.connection()
        self._options.pop("net", None)
        self.target = parse_cloud_address(models.cloud)
        self.own: SupervisedCloud | None = None

    @property
    def hosts(self) -> Sequence[tuple[str, int]]:
        """The addresses of the cloud, once they are known."""
        from outrider.verifiers.connect import parse_cloud_address

        return () if self.target.kind == "none" else parse_cloud_address(self._address).hosts

    def reach(self) -> VerifierFactory | None:
        """Wait for the gateway's own cloud. Return a function from an emulated network to a verifier, or None."""
        if self.target.kind == "none":
            return None
        if self.own is not None:
            self._address = f"grpc://{self.own.address()}"
        return self._connect

    def _connect(self, net: str) -> Verifier:
        from outrider.verifiers.connect import connect

        verifier = connect(self._address, **self._options, net=net)
        assert verifier is not None  # the kind is not "none"
        return verifier


@contextmanager
def open_cloud(models: Models, network: Network) -> Iterator[CloudConnection]:
    """Yield the cloud. Start a local one in a process of its own, for which the first connection waits."""
    cloud = CloudConnection(models, network)
    if cloud.target.kind != "local":
        yield cloud
        return
    from outrider.cli.subprocess_cloud import share_cores, supervised_cloud

    share_cores()
    given = {name: value for name, value in models.load_options.items() if value is not None}
    options = chain.from_iterable((f"--{name.replace('_', '-')}", value) for name, value in given.items())
    with supervised_cloud(cloud.target.model, *options) as own:
        cloud.own = own
        yield cloud


def fetch_tokenizer(reach: VerifierFactory | None) -> PromptLookup:
    """Return the tokenizer that the cloud sends, for a gateway without an edge model.

    Raises:
        CloudError: the cloud cannot be reached, or its tokenizer files cannot be used.
        ModelError: the cloud has no tokenizer, or its model captions recordings only.
    """
    from outrider.edge.target_tokenizer import read_target_tokenizer
    from outrider.verifiers.base import disconnect

    assert reach is not None  # --edge none with --cloud none was refused
    verifier = reach("none")
    try:
        target = verifier.describe(None)
        tokenizer = read_target_tokenizer(target)
    finally:
        disconnect(verifier)
    if tokenizer is None:
        raise ModelError(
            f"--edge none: {target.name} came without a tokenizer: give --edge MODEL, or --edge lookup:TOKENIZER"
        )
    if tokenizer.captions_only:
        raise ModelError(f"--edge none: {target.name} only captions recordings: give --edge MODEL")
    return tokenizer


@dataclass(frozen=True)
class CloudState:
    """The current state of the cloud. trouble: the reason if it cannot be used, else None.

    max_length: the most positions of prompt and output that edge and cloud hold, as far as known, None without a limit.
    tokenizer: the cloud's, if it was given by name or sent at the start.
    """

    name: Callable[[], str]
    max_length: Callable[[], int | None]
    trouble: Callable[[], str | None] = lambda: None
    tokenizer: PromptLookup | None = None


@contextmanager
def wait_for_cloud(
    engine: Engine | PromptLookup,
    tokenizer: PromptLookup | None,
    reach: VerifierFactory | None,
    cloud: CloudConnection,
) -> Iterator[CloudState]:
    """Connect to the cloud if it is reachable now. An incompatible cloud ends the gateway.

    With an unreachable cloud the gateway serves, and requests fail with 503 until the cloud can be reached.
    """
    from outrider.gateway.cloud_monitor import CloudMonitor

    if reach is None:
        yield CloudState(lambda: "none", lambda: engine.max_length)
        return
    with closing(CloudMonitor(engine, reach("none"), cloud.hosts, target_tokenizer=tokenizer)) as monitor:
        if not monitor.wait(CLOUD_TIMEOUT_S):
            log.warning("the cloud cannot be reached yet")
        own = cloud.own
        yield CloudState(
            lambda: monitor.name,
            lambda: monitor.max_length,
            lambda: (own.trouble if own is not None else None) or monitor.trouble,
            monitor.target_tokenizer,
        )
