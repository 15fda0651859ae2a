"""Channel arguments of gRPC: limits on connections that hold before any handler runs."""

from __future__ import annotations

from outrider.cloud.limits import Limits

HANDSHAKE_MS = 20_000  # TLS, and HTTP/2's first frames
IDLE_MS = 300_000  # after this long without a call a connection is closed
PING_MS, PONG_MS = 60_000, 20_000  # detects a peer that vanished
MIN_PING_INTERVAL_MS = 900  # a client may send a keepalive ping every second
MAX_CONNECTIONS = 1024
IDENTITY_ONLY = 1  # a set of compression algorithms: bit 0 is none at all

ChannelOption = tuple[str, int]


def server_options(limits: Limits) -> list[ChannelOption]:
    """Return the channel arguments of the server.

    Messages are never compressed. Without the last two arguments, gRPC before 1.79 inflates a compressed message before
    it checks the size, and before authentication.
    """
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_identity),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PONG_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
        ("grpc.per_message_decompression", 0),
    ]
