"""A hook of MkDocs: files outside `docs/` that a page links to become a part of the site, and nothing is loaded from
elsewhere.

The pages are read in the repository, too, so their links are those of its folders. A link to Markdown, or to a folder
with a README, leads to a page; one to any other file to the file itself.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
_LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["'](?:https?:)?//[^"']*""")


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked to, and what that links to."""
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for link in _LINK.finditer(page.content_string):
            target = _in_site(_target(page, link[1]))
            source = ROOT / target
            if files.get_file_from_path(target) is None and source.is_file():
                added = File.generated(config, target, abs_src_path=str(source), inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(added)
                waiting += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between folders of the repository into links between pages."""

    def turned(link: re.Match[str]) -> str:
        target = _in_site(_target(page.file, link[1]))
        return f"]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{link[2] or ''})"

    return _LINK.sub(turned, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that makes its reader's browser ask another server for anything."""
    if loaded := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {loaded[0]}")
    return output


def _target(page: File, link: str) -> str:
    """Where a link leads, as a path in the repository."""
    place = page.src_uri if page.generated_by else f"docs/{page.src_uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))


def _in_site(target: str) -> str:
    """The same as a path in the site; a folder is its README."""
    if (ROOT / target / "README.md").is_file():
        target += "/README.md"
    return target.removeprefix("docs/")
