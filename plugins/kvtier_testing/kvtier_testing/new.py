"""`kvtier new NAME --kind KIND`: a plugin of your own, ready to be installed, tested and used."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvtier_core.cli.output import FINE, Output
from kvtier_core.errors import BackendError

#: A folder for each kind, each a whole project whose plugin is called `example-KIND`. They are tested as they are. A
#: wheel has them inside the package, a clone beside it.
EXAMPLES = next(folder for above in Path(__file__).parents[:2] if (folder := above / "examples").is_dir())

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
#: More folders that a clone has where the examples have been run.
_NOT_COPIED = frozenset({"__pycache__", ".pytest_cache", ".hypothesis"})


def _spellings(name: str) -> tuple[str, str, str]:
    """In YAML, in a module's name, and in a class's name: ``my-tier``, ``my_tier``, ``MyTier``."""
    return name, name.replace("-", "_"), "".join(part.capitalize() for part in name.split("-"))


def kinds() -> list[str]:
    """The kinds of plugins: one for each example."""
    return sorted(project.parent.name for project in EXAMPLES.glob("*/pyproject.toml"))


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "new",
        help="start a plugin of your own, ready to install and test",
        description="Create the project of a plugin, kvtier-NAME: a small plugin of this kind that works, its tests "
        "with the laws of its interface, and the files to install and publish it.",
    )
    parser.add_argument("name", help="its name in YAML, in lower case: my-tier")
    parser.add_argument("--kind", required=True, choices=kinds())
    parser.add_argument("--into", type=Path, default=Path(), help="create kvtier-NAME in this folder")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """Make the project. Raises BackendError if that is impossible."""
    project = options.into / f"kvtier-{options.name}"
    if not _NAME.fullmatch(options.name):
        raise BackendError(
            f"{options.name!r} is not a valid name for a plugin; use lower-case letters, digits and single hyphens"
        )
    if options.name.startswith("kvtier"):
        raise BackendError(f"{options.name!r} begins with kvtier, which the name of the package gets anyway; remove it")
    if project.exists():
        raise BackendError(f"{project} already exists; choose another name, or another folder with --into")
    output.value = [str(file) for file in _copy(options.kind, options.name, project)]
    output.say(*output.value, "", f"cd {project} && pip install -e '.[test]' && pytest")
    return FINE


def _copy(kind: str, name: str, project: Path) -> list[Path]:
    """Make a project from the example of this kind, and return its files."""

    def renamed(text: str) -> str:
        for old, new in zip(_spellings(f"example-{kind}"), _spellings(name), strict=True):
            text = text.replace(old, new)
        return text

    made = []
    for source in sorted(path for path in (EXAMPLES / kind).rglob("*") if path.is_file()):
        inside = source.relative_to(EXAMPLES / kind)
        if _NOT_COPIED.isdisjoint(inside.parts):
            target = project / renamed(str(inside))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(source.read_text("utf-8")), "utf-8")
            made.append(target)
    return made
