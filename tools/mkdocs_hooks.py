"""Hooks of the documentation site: pages from files outside `docs/`, and links for both the repository and the site.

A page links to other files by their paths in the repository. The site has its own layout, so links are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def _outside() -> dict[str, str]:
    """Return the files outside `docs/` that the site holds: path in the repository to path in the site."""
    proto = next(ROOT.glob("src/outrider/*/outrider.proto")).relative_to(ROOT).as_posix()
    return {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
        "SECURITY.md": "security.md",
        "src/outrider/demo/MODEL_CARD.md": "model-card.md",
        "src/outrider/transport/README.md": "transport.md",
        "examples/outrider.ipynb": "outrider.ipynb",
        proto: "outrider.proto",
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside `docs/`."""
    for source, target in _outside().items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links of a page from paths in the repository to paths in the site."""
    outside = _outside()
    origin = {target: source for source, target in outside.items()}
    here = page.file.src_uri
    folder = posixpath.dirname(origin.get(here, f"docs/{here}"))

    def rewrite(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        target = outside.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None:
            return found[0]  # the strict build names it
        return found[1] + posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(rewrite, markdown)
