"""Outrider as the decoding loop of transformers' own `generate`."""
