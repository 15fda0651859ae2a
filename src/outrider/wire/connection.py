"""An edge's connection to a cloud: one gRPC channel through a link of our own, which counts every byte.

gRPC does not show its sockets. So its channel ends at a Unix socket in this process, and the link behind that carries
the bytes to the cloud; it is also where `--net` emulates a network. TLS runs through it untouched.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc

from outrider.netem.conditions import Conditions
from outrider.netem.link import Link
from outrider.wire import schema
from outrider.wire.ledger import Account
from outrider.wire.tls import ClientTls

T = TypeVar("T")
log = logging.getLogger(__name__)

GOODBYE = 1.0  # s that closing frames may take to leave


class Connection:
    """Lives in a thread and an event loop of its own; `run` brings work there.

    token: sent as a bearer token with every call.
    """

    def __init__(
        self, host: str, port: int, *, tls: ClientTls | None = None, token: str | None = None, net: Conditions
    ) -> None:
        self.link = Link(host, port, net)
        self.account = Account()
        self._host, self._tls = host, tls
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._folder = tempfile.mkdtemp(prefix="outrider-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-connection", daemon=True)
        self._thread.start()
        self.run(self._start()).result()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the connection's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self) -> None:
        path = os.path.join(self._folder, "s")
        await self.link.start_unix(path)
        options = [
            ("grpc.default_authority", self._host),
            ("grpc.ssl_target_name_override", self._host),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.max_receive_message_length", 64 * 2**20),
        ]
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{path}", options)
        else:
            self._channel = grpc.aio.secure_channel(f"unix:{path}", self._tls.credentials(), options)

    def open_stream(self) -> Any:
        """A new session stream: a grpc.aio call that writes and reads bytes."""
        return self._channel.stream_stream(f"/{schema.SERVICE}/Session")(metadata=self._metadata)

    async def describe(self, timeout: float) -> schema.DescribeAnswer:
        call = self._channel.unary_unary(f"/{schema.SERVICE}/Describe")
        request = schema.DescribeRequest(protocol=schema.VERSION).SerializeToString()
        data = await call(request, timeout=timeout, metadata=self._metadata)
        return schema.DescribeAnswer.FromString(data)

    async def vocabulary(self, timeout: float) -> list[str]:
        call = self._channel.unary_stream(f"/{schema.SERVICE}/Vocabulary")
        names: list[str] = []
        async for data in call(b"", timeout=timeout, metadata=self._metadata):
            names += schema.VocabularyPart.FromString(data).tokens
        return names

    def renew(self) -> None:
        """Give up the present TCP connection; the next call makes a new one."""
        self.link.cut()

    def close(self) -> None:
        """End the channel, the link and the thread."""
        if self._loop.is_closed():
            return
        self.run(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine and task.get_name().startswith("outrider")]
        if others:
            await asyncio.wait(others, timeout=GOODBYE)
        await self._channel.close()
        await self.link.close()
