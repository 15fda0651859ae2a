"""The files that a newcomer reads first agree with the repository: targets, versions, generated pages, citations."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints
from xml.etree import ElementTree

import pytest
import yaml

import outrider
from outrider.cli.app import app
from tools.record_demo import COLUMNS, Screen, Style

ROOT = Path(__file__).parents[1]
YAML = [
    *(ROOT / name for name in ("CITATION.cff", ".pre-commit-config.yaml", "mkdocs.yml", ".github/workflows/ci.yml")),
    *sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")),
]
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
NOT_IN_CI = {"test-chaos-long", "test-soak", "test-real"}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def parsed(name: str) -> Any:
    return yaml.safe_load(text(name))


def ci_targets() -> list[str]:
    """The make targets of .ci/run, in order."""
    return MAKE.findall("\n".join(line for line in text(".ci/run").splitlines() if not line.startswith("#")))


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_files_parse(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_workflow_runs_the_targets_of_ci() -> None:
    matrix = parsed(".github/workflows/ci.yml")["jobs"]["make"]["strategy"]["matrix"]
    assert sorted(matrix["target"]) == sorted(ci_targets())
    assert {entry["target"] for entry in matrix["include"]} <= set(matrix["target"])


def test_ci_runs_every_test_target_but_the_long_ones() -> None:
    targets = set(re.findall(r"^(test-[a-z-]+):", text("Makefile"), re.M))
    assert targets - set(ci_targets()) == NOT_IN_CI


@pytest.mark.parametrize(
    "name", [".ci/run", ".pre-commit-config.yaml", ".github/workflows/ci.yml", "CONTRIBUTING.md", "SECURITY.md"]
)
def test_make_targets_exist(name: str) -> None:
    known = set(re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.M))
    found = set(MAKE.findall(text(name)))
    assert found <= known


def test_the_table_of_contributing_names_every_test_target() -> None:
    rows = [line for line in text("CONTRIBUTING.md").splitlines() if line.startswith("|")]
    named = set(MAKE.findall("\n".join(rows)))
    assert set(re.findall(r"^(test-[a-z-]+):", text("Makefile"), re.M)) <= named
    in_ci = {target for row in rows if "| yes |" in row for target in MAKE.findall(row.split("| yes |")[0])}
    assert in_ci == set(ci_targets())


def test_the_citation_has_the_version_and_licence_of_the_package() -> None:
    citation, project = parsed("CITATION.cff"), tomllib.loads(text("pyproject.toml"))["project"]
    assert citation["version"] == outrider.__version__
    assert citation["license"] == project["license"]
    assert citation["abstract"] == project["description"].partition(":")[0]


def test_documents_name_the_wheel_of_this_version() -> None:
    pages = text("README.md") + text("docs/usage.md")
    wheels = set(re.findall(r"outrider-([\d.]+)-py3", pages))
    assert wheels == {outrider.__version__}


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs/images").iterdir()}
    assert all(size < 200_000 for size in sizes.values()), sizes


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]

    navigation = pages(parsed("mkdocs.yml")["nav"])
    assert len(set(navigation)) == len(navigation)
    assert {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} <= set(navigation)


def test_the_page_on_results_has_every_key_and_counter() -> None:
    kinds = get_type_hints(outrider.Result)
    (source,) = get_args(kinds["sources"])
    keys = [field.name for kind in (outrider.Result, kinds["stats"]) for field in fields(kind)]
    words = [*keys, *(one.value for one in source), *get_args(kinds["finish_reason"]), *get_args(kinds["guarantee"])]
    page = text("docs/results.md")
    assert [word for word in words if f"`{word}`" not in page] == []


def test_the_python_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: outrider\.(\w+)$", text("docs/api.md"), re.M)
    assert sorted(listed) == sorted(outrider.__all__)


def test_the_command_line_reference_is_up_to_date() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "cli_reference.py")]
    made = subprocess.run(tool, capture_output=True, encoding="utf-8", check=True, timeout=300).stdout
    assert made == text("docs/cli.md"), "run make cli-reference"


def test_cited_design_pages_and_sections_exist() -> None:
    cited = set()
    for folder in ("src", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            cited |= set(re.findall(r'(docs/[\w/]+\.md)(?:, "([^"\n]+)"|)', source))
    for page, section in cited:
        assert (ROOT / page).exists(), page
        assert not section or re.search(rf"^#+ {re.escape(section)}$", text(page), re.M), f"{page}: {section}"


@pytest.mark.parametrize(
    "name",
    ["CONTRIBUTING.md", "SECURITY.md", "docs/extending.md", "docs/structure.md", "docs/design/failures.md"],
)
def test_files_that_are_named_exist(name: str) -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text(name))
    commands = re.findall(r"^\.venv/bin/pytest (.*)", text(name), re.M)
    named += [word for command in commands for word in command.split("#")[0].split() if not word.startswith("-")]
    roots = [ROOT, ROOT / "src" / "outrider"]
    missing = [path for path in named if not any((root / path).exists() for root in roots)]
    assert [path for path in missing if not path.startswith(".cache/")] == []


def examples() -> list[str]:
    """The example commands of the help texts, as the reference of the command line shows them."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text("docs/cli.md"), re.M | re.S)
    return [line.split("  #")[0] for block in blocks for line in block.splitlines() if line.startswith("outrider ")]


@pytest.mark.parametrize("line", examples())
def test_examples_of_the_help_texts_have_known_commands_and_options(line: str) -> None:
    words = shlex.split(re.split(" [<>|] ", line)[0])
    app.parse_args(words[1:], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("path", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.name)
def test_drawings_are_well_formed_and_load_nothing(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    ElementTree.fromstring(source)
    assert not re.search(r"<script|(?:href|src)=\"(?!#)|@import|url\((?!#)", source)


def test_the_recorder_follows_the_cursor() -> None:
    screen = Screen()
    screen.feed("one\r\n\x1b[2mtwo\x1b[0m three\r\x1b[2K\x1b[1A\x1b[2K\x1b[32mnew\x1b[0m\r\nlast")
    assert screen.view() == ((("new", Style("#7ee787")),), (("last", Style()),))


def test_the_recorder_wraps_long_lines() -> None:
    screen = Screen()
    screen.feed("x" * (COLUMNS + 3) + "\ny")
    assert ["".join(piece for piece, _ in line) for line in screen.view()] == ["x" * COLUMNS, "xxx", "y"]


@pytest.mark.parametrize("name", ["docs/extending.md", "docs/structure.md"])
def test_names_in_the_guides_exist(name: str) -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"`([A-Z]\w+)(?:\.\w+\(\))?`", text(name))) - {"TEXT", "SLIDING", "AutoModelForCausalLM"}
    assert named
    assert {name for name in named if not re.search(rf"^(?:class {name}\b|{name}\b.*=)", source, re.M)} == set()


def test_modules_that_documents_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(outrider\.[a-z_]+\.[a-z_.]+)`", page.read_text("utf-8"))}
    paths = {name: ROOT / "src" / name.replace(".", "/") for name in named}
    assert {name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())} == set()


def terms() -> list[tuple[str, str]]:
    """The rows of the first table of docs/structure.md: each term with each of its files."""
    table = text("docs/structure.md").split("## Find a term")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if "`" in line]
    return [(term, file) for term, files in rows for file in re.findall(r"`([^`]+)`", files)]


@pytest.mark.parametrize(("term", "file"), terms())
def test_a_search_for_a_standard_term_finds_its_file(term: str, file: str) -> None:
    pattern = re.sub("[ -]", "[ _-]?", term)
    assert re.search(pattern, text(f"src/outrider/{file}"), re.I), f"{file} does not contain {term!r}"


def test_the_table_of_terms_has_the_terms_of_the_field() -> None:
    expected = {"scheduler", "KV cache", "rejection sampling", "gate", "draft length controller", "retry", "backoff"}
    assert expected | {"request handler", "protocol"} <= {term for term, _ in terms()}
