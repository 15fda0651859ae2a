"""Measure how the source reads: sizes, annotations, docstrings, and words that are no terms of the field.

    python tools/readability.py [src/outrider] [--list]

Print JSON. Lengths are in lines. Words are counted in comments and docstrings, per 1,000. `--list` also prints each
public name without a docstring, each docstring with a semicolon, and each line with a word of `PRIVATE`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRIVATE = re.compile(r"\b(?:what(?:ever)?|who(?:ever|se|m)?|nobody|somebody|told|tells?|telling|said|says?)\b", re.I)
VERBS = frozenset(
    """
    abandon abort accept account acquire add adjust admit advance allow announce answer append apply arm ask assemble
    assign attach audit await begin bind book bound bring build cache calculate call cancel cap capture charge check
    choose claim clear close collect combine commit compare compile complain complete compute configure connect consume
    continue convert copy correct count cover create cut deal decide decode decrease define delay delete deliver derive
    describe detach detect determine dial disable discard disconnect dispatch distribute divide drain draft draw drive
    drop emit enable encode end enqueue ensure enter erase escape estimate evaluate evict examine exclude execute exit
    expand expect explain expose extend extract fail feed fetch fill filter find finish fit flatten flush fold follow
    forget format forward free fuse gather generate get give go grant group grow guard halve handle hand hash hide hold
    ignore import include increase increment index infer inform initialise insert inspect install interpret interrupt
    invalidate invert issue iterate join judge keep kill label launch lay lead leave let limit link list listen load
    locate lock log look lose lower make map mark mask match measure merge migrate mix move multiply name normalise note
    notify observe obtain offer omit open order pack pad pair parse pass pause peek perform pick pin place plan play
    point poll pop populate post predict prefill prepare present preserve prevent print probe process produce project
    propose prove provide prune publish pull push put quantise query queue quote raise rank read rebuild receive
    recompute reconnect record recover reduce refer refill refresh refuse register reject relay release reload remember
    remove rename render renew repair repeat replace replay reply report represent request require resample reserve
    reset resize resolve respond restart restore resume retire retry return reuse reverse rewind roll rotate round run
    sample save scale scan schedule score search seed select send separate serialise serve set settle shift show shrink
    shut sign signal simulate size skip sleep slice smooth solve sort spend split spread stall start state steal step
    stop store stream strip submit subtract sum summarise supply support suppress suspend swap switch synchronise take
    tear test throttle time tokenise toggle total trace track train transcribe transfer transform translate trim trigger
    truncate try turn undo unpack update upload use validate verify visit wait wake walk warm warn watch wrap write
    yield
    """.split()  # noqa: SIM905
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Source:
    """One module. named: its functions and classes, with those within classes but not within functions."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return every function, also nested ones."""
        return [node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS)]

    @property
    def public(self) -> list[Named]:
        """Return the public functions, classes and methods."""
        return list(_public(self.tree))

    def documented(self) -> list[tuple[int, str]]:
        """Return line and text of every docstring."""
        kinds = (*FUNCTIONS, ast.ClassDef, ast.Module)
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, kinds)]
        return [(getattr(node, "lineno", 1), text) for node in nodes if (text := ast.get_docstring(node))]

    def comments(self) -> Iterator[tuple[int, str]]:
        """Yield line and text of every comment."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[Named]:
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def load(root: Path) -> list[Source]:
    """Parse all Python files below `root` except generated ones."""
    paths = [path for path in sorted(root.rglob("*.py")) if not path.name.endswith("_pb2.py")]
    return [Source(path, text := path.read_text(encoding="utf-8"), ast.parse(text)) for path in paths]


def annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether every parameter but self and cls, and the result, has a type."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return function.returns is not None and all(a.annotation or a.arg in ("self", "cls") for a in arguments)


def opens_with_verb(text: str) -> bool:
    """Return whether a docstring begins with an imperative verb."""
    return re.match(r"[A-Za-z]*", text)[0].lower() in VERBS  # type: ignore[index]


def measure(sources: list[Source]) -> dict[str, object]:
    """Compute all figures."""
    functions = [node for source in sources for node in source.functions]
    sizes = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    public = [node for source in sources for node in source.public]
    docstrings = [text for source in sources for _, text in source.documented()]
    of_functions = [text for node in functions if (text := ast.get_docstring(node))]
    prose = " ".join([*docstrings, *(text for source in sources for _, text in source.comments())])
    words = len(re.findall(r"[A-Za-z][A-Za-z'’-]*", prose))
    return {
        "files": len(sources),
        "lines": sum(source.text.count("\n") for source in sources),
        "files_over_400": [str(source.path) for source in sources if source.text.count("\n") > 400],
        "functions": len(functions),
        "median_function": statistics.median(sizes),
        "functions_over_60": sum(size > 60 for size in sizes),
        "annotated": round(sum(map(annotated, functions)) / len(functions), 3),
        "any": sum(len(re.findall(r"\bAny\b", source.text)) for source in sources),
        "public_names": len(public),
        "public_documented": round(sum(bool(ast.get_docstring(node)) for node in public) / len(public), 3),
        "function_docstrings_with_verb": round(sum(map(opens_with_verb, of_functions)) / len(of_functions), 3),
        "docstrings_with_semicolon": round(sum(";" in text for text in docstrings) / len(docstrings), 3),
        "words": words,
        "private_per_1000": round(1000 * len(PRIVATE.findall(prose)) / words, 2),
    }


def findings(sources: list[Source]) -> Iterator[str]:
    """Yield a line for each place to mend."""
    for source in sources:
        for node in source.public:
            if not ast.get_docstring(node):
                yield f"{source.path}:{node.lineno}: no docstring: {node.name}"
        for line, text in [*source.documented(), *source.comments()]:
            for found in PRIVATE.finditer(text):
                yield f"{source.path}:{line}: {found[0]!r}: {text.splitlines()[0]}"
        for line, text in source.documented():
            if ";" in text:
                yield f"{source.path}:{line}: semicolon: {text.splitlines()[0]}"
        for node in source.functions:
            text = ast.get_docstring(node) or ""
            if text and not opens_with_verb(text):
                yield f"{source.path}:{node.lineno}: no verb: {text.splitlines()[0]}"


def main() -> None:
    """Measure the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path("src/outrider"))
    parser.add_argument("--list", action="store_true", help="also print the places")
    given = parser.parse_args()
    sources = load(given.root)
    if given.list:
        print(*findings(sources), sep="\n")
    print(json.dumps(measure(sources), indent=2))


if __name__ == "__main__":
    main()
