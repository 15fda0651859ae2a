"""The verifier as a gRPC service: sessions, batches, limits, authentication and metrics."""
