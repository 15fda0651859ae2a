"""The command line: options, checks, and the wiring of the other packages."""
