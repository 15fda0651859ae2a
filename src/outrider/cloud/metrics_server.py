"""Metrics and health over plain HTTP, for Prometheus and load balancers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CONTENT_TYPE_LATEST

from outrider.errors import SettingsError

ANY_ADDRESSES = ("::", "0.0.0.0")
REQUEST_TIMEOUT_S = 10.0  # s that a request may take
TEXT_PLAIN = "text/plain; charset=utf-8"


class MetricsServer:
    """An HTTP server for `/metrics` and `/health`, until it is closed.

    host: a name, an address, or "" for every interface, IPv4 and IPv6. text: returns the metrics. healthy: whether the
    service accepts new sessions.

    Raises:
        SettingsError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str], healthy: Callable[[], bool]) -> None:
        try:
            listener = listen(host, port)
        except (OSError, OverflowError, UnicodeError) as error:  # overflow: a port above 65535
            where = host or "every interface"
            raise SettingsError(f"metrics cannot be served on {where}, port {port}: {error}") from error
        self._server = _HttpServer(listener, text, healthy)
        self.port: int = listener.getsockname()[1]
        self._thread = Thread(target=self._server.serve_forever, name="outrider-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and wait for the server's thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. host: a name, an address, or "" for every interface, IPv4 and IPv6."""
    if not 0 <= port < 65536:
        raise OverflowError("a port must be between 0 and 65535")
    if not host:
        if socket.has_dualstack_ipv6():
            return socket.create_server((ANY_ADDRESSES[0], port), family=socket.AF_INET6, dualstack_ipv6=True)
        host = ANY_ADDRESSES[1]
    (family, _, _, _, address), *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return socket.create_server((address[0], port, *address[2:]), family=family)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, text: Callable[[], str], healthy: Callable[[], bool]) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.text, self.healthy = listener, text, healthy

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics" | "/":
                status, kind, body = 200, CONTENT_TYPE_LATEST, self.server.text()
            case "/health":
                healthy = self.server.healthy()
                status, kind, body = 200 if healthy else 503, TEXT_PLAIN, "SERVING\n" if healthy else "NOT_SERVING\n"
            case _:
                status, kind, body = 404, TEXT_PLAIN, "not found: there are /metrics and /health\n"
        data = body.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Log no requests."""
