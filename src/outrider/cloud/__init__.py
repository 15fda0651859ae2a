"""The verifier as a service: who may use it, how much, and what it tells its operator."""
