"""Mutation testing of `outrider.sampling` and `outrider.decoding`: the share of single faults that its tests detect.

    python tools/mutate.py [--count 200] [--seed 13] [--only N,N…] [--start N] [--budget SECONDS] [--log FILE]

A mutant differs from the source in one operator, constant, condition, returned value or statement. Each runs the tests
of both packages and the equivalence tests (stopping at the first failure) on a copy of the package; a mutant that all
of them pass has survived. `EQUIVALENT` lists survivors that change no output, but perhaps its speed, each with the
reason. The last line on stdout is a JSON object. Exit code 1 where less than 90 % of the other mutants are killed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGES = [SOURCE / "outrider" / name for name in ("sampling", "decoding")]
TESTS = (
    *(f"tests/edge/test_{name}.py" for name in ("drivers", "pipelined", "auto_k")),
    *(f"tests/equivalence/test_{name}.py" for name in ("greedy", "sampled")),
)
PROCESSOR_S = 240  # a mutant that computes for longer is killed: processor time does not depend on the machine's load
HANG_S = 1200  # … and one that waits for ever
GOAL = 0.9

SAME_ZERO = "0 × penalty and 0 ÷ penalty are the same 0: penalties are 0.01 to 100"
EQUIVALENT = {  # "module original → mutant", of the whole line where the rest would be ambiguous: why no output differs
    "logits logits.device.type == \"cpu\" → (logits.device.type != 'cpu')": "NumPy or torch does the same arithmetic",
    "adaptive_draft_length survival * (fixed + per_token * k) > per_token * tokens → "
    "(survival * (fixed + per_token * k) >= per_token * tokens)": (
        "where both sides are equal, a longer block brings as many tokens a second"
    ),
    "adaptive_draft_length 2.5 → 3.5": "a choice: the border between two kinds of tokens; k auto affects speed alone",
    "logits_processors scores < 0 → (scores <= 0)": SAME_ZERO,
    "batched_sampler scores < 0 → (scores <= 0)": SAME_ZERO,
    "batched_sampler tail = history.gather(1, torch.clamp(lengths - ngram + 1 + n, min=0 → 1))": (
        "where the index is below 1, the prefix is shorter than an n-gram, and all its entries are masked already"
    ),
}

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed piece of a module: source[start:end] becomes `new`."""

    path: Path
    line: int
    start: int
    end: int
    new: str

    @property
    def change(self) -> str:
        return f"{_short(self.path.read_text()[self.start : self.end])} → {_short(self.new)}"

    @property
    def name(self) -> str:
        return f"{self.path.stem}:{self.line} {self.change}"

    @property
    def is_equivalent(self) -> bool:
        return not EQUIVALENT.keys().isdisjoint(
            {f"{self.path.stem} {text}" for text in (self.change, self.in_its_line)}
        )

    @property
    def in_its_line(self) -> str:
        """The change with what stands before and behind it in its line."""
        text = self.path.read_text()
        begin, end = text.rfind("\n", 0, self.start) + 1, text.find("\n", self.end)
        return _short(text[begin : self.start] + self.change + text[self.end : end])

    def source(self) -> str:
        """The whole module with the change."""
        text = self.path.read_text()
        return text[: self.start] + self.new + text[self.end :]


def _short(text: str) -> str:
    return " ".join(text.split())


def mutants(path: Path) -> Iterator[Mutant]:
    """All single changes of a module, in the order of its syntax tree."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        encoded = text[starts[line - 1] : starts[line]].encode()
        return starts[line - 1] + len(encoded[:column].decode())

    for node in _executable(ast.parse(text)):
        for new in _changes(node):
            end = offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
            yield Mutant(path, node.lineno, offset(node.lineno, node.col_offset), end, new)


def _executable(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes that affect behaviour: no annotations, docstrings or error messages."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "type_comment") or isinstance(tree, (ast.Raise, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child
            if isinstance(child, ast.AST) and not isinstance(child, (ast.ImportFrom, ast.Import)):
                yield from _executable(child)


def _changes(node: ast.AST) -> Iterator[str]:
    """The replacements of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield _unparse(ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield _unparse(ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _unparse(ast.BoolOp(other, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield _unparse(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield repr(not node.value)
    elif isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        yield from ()  # their conditions are expressions, changed above where they can be
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return None"
    elif _is_statement(node):
        yield "pass"


def _is_statement(node: ast.AST) -> bool:
    """Return whether to drop a statement: a call, or a lasting assignment. A dropped local name would be a
    NameError."""
    if isinstance(node, ast.Assign):
        return not all(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets)
    return isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield))
    )


def _unparse(node: ast.AST) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


def sample(count: int, seed: int) -> list[Mutant]:
    """Return random mutants of all modules of both packages, each equally likely."""
    found = [mutant for package in PACKAGES for path in sorted(package.glob("*.py")) for mutant in mutants(path)]
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[n] for n in chosen]


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether all tests pass with the mutant in place, in `copy` of the package.

    They run in a fork of this process, which has imported the slow libraries but not outrider.
    """
    target = copy / mutant.path.relative_to(SOURCE)
    target.write_text(mutant.source())
    child = os.fork()
    if not child:
        code = 70
        try:
            code = _run_tests(mutant, copy)
        except BaseException:  # noqa: BLE001 - a fork must not go on with its parent's work
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    try:
        return _exit_code(child) == 0
    finally:
        target.write_text(mutant.path.read_text())


def _run_tests(mutant: Mutant, copy: Path) -> int:
    import pytest

    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S + 5))
    with (copy / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    os.chdir(ROOT)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *_ordered(mutant)]))


def _exit_code(child: int) -> int:
    """Return the exit code of a process, which is killed after a while."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code > 2:  # neither tests nor collection failed
                raise RuntimeError(f"pytest did not run: exit code {code}")
            return code
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def _ordered(mutant: Mutant) -> list[str]:
    """The tests, those of the changed module first."""
    own = f"tests/{mutant.path.parent.name}/test_{mutant.path.stem}.py"
    folders = [ROOT / "tests" / package.name for package in PACKAGES]
    rest = sorted(str(path.relative_to(ROOT)) for folder in folders for path in folder.glob("test_*.py"))
    return [*([own] if own in rest else []), *(path for path in rest if path != own), *TESTS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--start", type=int, default=0, help="skip so many of the sample")
    parser.add_argument("--only", default="", help="numbers in the sample, with commas")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no mutant after so many seconds")
    parser.add_argument("--log", type=Path, help="append one JSON line for each mutant")
    given = parser.parse_args()
    chosen = sample(given.count, given.seed)
    numbers = [int(n) for n in given.only.split(",") if n] or range(given.start, len(chosen))
    os.environ |= {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for library in ("torch", "scipy.stats", "hypothesis", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(library)
    began, survivors, tried = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src" / "outrider", copy / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
        if not survives(Mutant(chosen[0].path, 0, 0, 0, ""), copy):
            print((copy / "output").read_text(), file=sys.stderr)
            raise SystemExit("the tests fail without a mutant: there is nothing to measure")
        for number in numbers:
            if time.monotonic() - began > given.budget:
                break
            mutant = chosen[number]
            alive, tried = survives(mutant, copy), tried + 1
            survivors += [mutant] if alive else []
            print(number, "SURVIVED" if alive else "killed", mutant.name, file=sys.stderr, flush=True)
            if given.log:
                with given.log.open("a") as file:
                    file.write(json.dumps({"number": number, "alive": alive, "mutant": mutant.name}) + "\n")
    left = [mutant.name for mutant in survivors if not mutant.is_equivalent]
    judged = tried - (len(survivors) - len(left))
    share = 1 - len(left) / judged if judged else 1.0
    print(json.dumps({"tried": tried, "killed": share, "survivors": left, "equivalent": len(survivors) - len(left)}))
    return int(share < GOAL)


if __name__ == "__main__":
    sys.exit(main())
