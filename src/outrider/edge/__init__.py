"""The edge side: drafting, drivers and the session with the verifier."""
