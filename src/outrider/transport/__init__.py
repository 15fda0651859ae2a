"""Connections to a cloud: HTTP/2, gRPC calls, an HTTP client, TLS and byte counts."""
