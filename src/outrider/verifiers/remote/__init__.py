"""The verifier for a running `outrider cloud`."""
