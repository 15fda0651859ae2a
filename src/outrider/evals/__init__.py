"""Evaluation of decoding modes: data sets, runs, metrics and reports."""
