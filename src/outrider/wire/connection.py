"""An edge's connection to a cloud: one gRPC channel through a link of our own, which counts every byte.

The channel ends at a Unix socket in this process, and the link behind that carries the bytes to the cloud; it is also
where `--net` emulates a network. TLS runs through it untouched.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from outrider.errors import CloudError
from outrider.netem.conditions import Conditions
from outrider.netem.link import Link
from outrider.wire import schema
from outrider.wire.channel import Channel
from outrider.wire.http2 import Http2
from outrider.wire.ledger import Account
from outrider.wire.stream import Stream
from outrider.wire.tls import ClientTls

T = TypeVar("T")
log = logging.getLogger(__name__)

GOODBYE = 1.0  # s that closing frames may take to leave
GOODBYE_NAME = "outrider-goodbye"  # tasks of this name may finish while the connection is closed


class Connection:
    """Lives in a thread and an event loop of its own; `run` brings work there.

    token: sent as a bearer token with every call.
    """

    def __init__(
        self, host: str, port: int, *, tls: ClientTls | None = None, token: str | None = None, net: Conditions
    ) -> None:
        self.link = Link(host, port, net)
        self.account = Account()
        self._host, self._tls, self._name = host, tls, f"grpc://{host}:{port}"
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = Channel(self._open, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", metadata)
        self._folder = tempfile.mkdtemp(prefix="outrider-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # also where nobody disconnects
        self._path = os.path.join(self._folder, "s")
        self._lock = threading.Lock()
        self._ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-connection", daemon=True)
        self._thread.start()
        self.run(self.link.start_unix(self._path)).result()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the connection's loop.

        Raises:
            CloudError: the connection is closed; where that comes before the work is done, the future raises it.
        """
        with self._lock:
            if self._ended:
                work.close()
                raise self._disconnected()
            return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._ended:
                raise
            raise self._disconnected() from None
        finally:
            self._tasks.discard(task)

    def _disconnected(self) -> CloudError:
        return CloudError(f"{self._name} was disconnected")

    async def _open(self, factory: Callable[[], Http2]) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.create_unix_connection(factory, self._path)
        else:
            context = self._tls.context()
            await loop.create_unix_connection(factory, self._path, ssl=context, server_hostname=self._host)

    async def open_stream(self) -> Stream:
        """A new session stream."""
        return await self._channel.stream(f"/{schema.SERVICE}/Session")

    async def describe(self, timeout: float) -> schema.DescribeAnswer:
        request = schema.DescribeRequest().SerializeToString()
        data = await self._channel.unary(f"/{schema.SERVICE}/Describe", request, timeout)
        return schema.DescribeAnswer.FromString(data)

    async def vocabulary(self, timeout: float) -> list[str]:
        names: list[str] = []
        async for data in self._channel.unary_stream(f"/{schema.SERVICE}/Vocabulary", b"", timeout):
            names += schema.VocabularyPart.FromString(data).tokens
        return names

    def retire(self) -> None:
        """Let present calls finish on the present TCP connection; the next call makes a new one."""
        self._channel.retire()

    def renew(self) -> None:
        """Give up the present TCP connection; the next call makes a new one."""
        self._channel.drop()
        self.link.cut()

    def close(self) -> None:
        """End the channel, the link and the thread."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            stopped = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        stopped.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop(self) -> None:
        """Goodbyes may leave; who waits for an answer is told that none comes."""
        goodbyes = {task for task in self._tasks if task.get_name() == GOODBYE_NAME}
        for task in self._tasks - goodbyes:
            task.cancel()
        if goodbyes:
            await asyncio.wait(goodbyes, timeout=GOODBYE)
        await self._channel.close()
        await self.link.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GOODBYE)
