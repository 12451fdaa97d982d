"""What plugins of the group kvtier.v1 are written against: it grows by what is optional, and by nothing else.

`make api` writes tests/api_v1.txt, a line for each name and signature. A line that disappears from it, or one with
`required` that is new, breaks plugins that are published: that needs another major version, and another group.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from kvtier_core import errors, hookspecs, interfaces, layouts, outside, types
from kvtier_core.forks import ProcessBound
from kvtier_core.storekit import shared_space
from kvtier_core.transfer import host_mover

GOLDEN = Path(__file__).with_name("api_v1.txt")
#: What a plugin may import; of `transfer` and `storekit` what the plugins of this repository use.
MODULES = (errors, outside, types, layouts, interfaces, hookspecs)
OFFERED = {host_mover: ("HostMover",), shared_space: ("SharedSpace",)}


def described() -> list[str]:
    """A line for each name and signature, sorted within each module."""
    lines = []
    for module in MODULES:
        public = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if not name.startswith("_") and _is_of(value, module)
        ]
        lines += _of_names(module, sorted(public))
    for module, names in OFFERED.items():
        lines += _of_names(module, names)
    return lines


def _is_of(value: Any, module: Any) -> bool:
    if isinstance(value, str | int):
        return module in (types, hookspecs)
    return getattr(value, "__module__", None) == module.__name__


def _of_names(module: Any, names: Any) -> Iterator[str]:
    for name in names:
        value = getattr(module, name)
        path = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            bases = [base for base in value.__bases__ if base is not ProcessBound] or [object]  # it asks for nothing
            yield f"{path}: class({', '.join(base.__name__ for base in bases)})"
            yield from (f"{path}.{line}" for line in _of_class(value))
        elif inspect.isfunction(value):
            yield f"{path}{_signature(value)}"
        elif isinstance(value, str | int):
            yield f"{path} = {value!r}"
        else:
            yield path


def _of_class(cls: type) -> Iterator[str]:
    """What a user or an implementer of the class sees of it, but for what it inherits."""
    if issubclass(cls, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in cls)
        return
    if attrs.has(cls):
        fields = [field for field in attrs.fields(cls) if not field.inherited]
        yield from (
            f"{field.alias}: {field.type}{' = …' if field.default is not attrs.NOTHING else ' required'}"
            for field in fields
        )
    elif "__init__" in vars(cls):
        yield f"__init__{_signature(cls.__init__)}"
    for name, annotation in sorted(inspect.get_annotations(cls).items()):
        if "ClassVar" in str(annotation) or not attrs.has(cls):
            annotation = getattr(annotation, "__forward_arg__", annotation)
            yield f"{name}: {annotation}{' = …' if hasattr(cls, name) else ' required'}"
    abstract = getattr(cls, "__abstractmethods__", frozenset())
    for name, value in sorted(vars(cls).items()):
        call = getattr(value, "__func__", value)
        required = " required" if name in abstract else ""
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{name}: property{required}"
        elif inspect.isfunction(call):
            yield f"{name}{_signature(call)}{required}"


def _signature(call: Any) -> str:
    """As it is written, with a mark where there is a default: some of these are other objects where C++ is missing."""
    signature = inspect.signature(call)
    marked = [
        each.replace(default=...) if each.default is not each.empty else each for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=marked)).replace("'", "").replace("Ellipsis", "…")


def test_the_interface_of_plugins_is_unchanged():
    gone = sorted(set(GOLDEN.read_text().splitlines()) - set(described()))
    assert not gone, (
        "plugins that are published use these: keep them, or raise the major version of the interface, "
        f"{hookspecs.GROUP!r}:\n" + "\n".join(gone)
    )


def test_plugins_need_not_implement_anything_new():
    new = [line for line in described() if line not in GOLDEN.read_text().splitlines()]
    required = [line for line in new if line.endswith(" required")]
    assert not required, "plugins that are published lack these: give them a default:\n" + "\n".join(required)
    assert not new, "new in the interface; `make api` writes it down:\n" + "\n".join(new)


def test_the_version_is_that_of_the_file():
    assert f".{GOLDEN.stem.removeprefix('api_')}" == hookspecs.GROUP.removeprefix("kvtier")


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(described()) + "\n")
