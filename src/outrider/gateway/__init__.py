"""The edge as an endpoint: many clients at once on one drafter."""
