"""Verifiers: in this process, in a cloud, or on an LLM server."""
