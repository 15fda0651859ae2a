"""Sampling: from logits to tokens, and verification of drafts. Imports neither models nor sockets."""
