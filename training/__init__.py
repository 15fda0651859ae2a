"""How the bundled demonstration pair was made, re-runnable: `python -m training.train --help`."""
