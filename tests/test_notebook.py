"""The example notebook runs from top to bottom, and has no stored output that could be out of date."""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.result import Result

NOTEBOOK = Path(__file__).parents[1] / "examples" / "outrider.ipynb"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


async def execute(sources: list[str]) -> list[Any]:
    """The value of the last line of each cell, None if it is no expression. Cells may await, as in IPython."""
    names: dict[str, Any] = {"__builtins__": builtins}
    values = []
    for number, source in enumerate(sources):
        body = ast.parse(source).body
        if isinstance(body[-1], ast.Expr):
            body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], body[-1].value), body[-1])
        tree = ast.fix_missing_locations(ast.Module(body, []))
        names["_"] = None
        code = compile(tree, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        outcome = eval(code, names)
        if inspect.iscoroutine(outcome):
            await outcome
        values.append(names["_"])
    return values


def test_the_notebook_runs_and_its_cells_show_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    result, figures, _, texts, outcomes, pair, *_, warnings = asyncio.run(
        execute(["".join(cell["source"]) for cell in code_cells()])
    )
    assert "Same text as the cloud alone would give" in result._repr_html_()
    assert figures[0] == "exact"
    assert len(texts) == 4
    assert all(texts)
    assert [isinstance(outcome, Result) for outcome in outcomes] == [True, False]
    assert pair[0] == texts[0]
    assert "only writes captions" in warnings[0]
    printed = capsys.readouterr().out
    assert "provisional 0" in printed
    assert pair[1] in printed
    assert printed.endswith("cancelled\n")


def test_the_notebook_stores_no_output() -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in code_cells()] == [([], None)] * len(code_cells())
