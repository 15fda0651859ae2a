"""Arguments and wiring; no algorithm."""
