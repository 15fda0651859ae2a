"""Code that the gateway and the cloud share: tokens, addresses, sizes, logs."""
