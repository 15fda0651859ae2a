"""Realised live loss of calibrated gates, with drafters that are scripted to break the budget.

For every scripted pair of `tests/support/adversaries.py`, budget, loss and signal: calibrated on a random half of the
requests, the other half decoded live. Prints the mean realised loss over splits, the share of blocks that were
escalated and how often calibration refused; ends with one JSON line.

    python -m benchmarks.adversaries [NAME …] [--requests 300] [--splits 20]
"""

from __future__ import annotations

import argparse
import json
from typing import get_args

from outrider.config import Loss
from outrider.decoding.gate import SIGNAL_NAMES
from tests.support.adversaries import PAIRS, Suite

BUDGETS = (0.02, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PAIRS)}; by default all")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--splits", type=int, default=20)
    options = parser.parse_args()
    worst = 0.0
    for name in options.names or PAIRS:
        suite = Suite(name, options.requests)
        for epsilon in BUDGETS:
            for loss in get_args(Loss):
                for signal in SIGNAL_NAMES:
                    risk, escalation, refused = suite.splits(epsilon, loss, signal, options.splits)
                    worst = max(worst, risk / epsilon)
                    row = f"{name:22s} {epsilon:4g} {loss:8s} {signal:8s}"
                    print(f"{row} risk {risk:.4f}  escalated {escalation:.3f}  refused {refused}", flush=True)
    print(json.dumps({"benchmark": "adversaries", "largest_risk_over_budget": worst}))


if __name__ == "__main__":
    main()
