"""Deciding with numbers: what is evaluated, and how it is scored."""
