"""A model and its KV slots."""
