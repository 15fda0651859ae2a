"""Sampling: from logits to tokens, and acceptance of drafts. Imports neither models nor sockets."""
