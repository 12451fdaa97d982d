"""What kvtier remembers: every table of a stack, of a session, of a server, as values that can be compared."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = (bool, int, float, str, bytes, enum.Enum, type(None))


def tables(*objects: Any) -> list[Any]:
    """All that these objects and those that belong to them remember: their attributes, down to plain values.

    Of objects that are not kvtier's own, such as threads, files and memory, and of functions only the type is noted.
    """
    numbers: dict[int, int] = {}

    def plain(of: Any) -> Any:
        if isinstance(of, _PLAIN):
            return of
        if isinstance(of, list | tuple | deque):
            return [type(of).__name__, *map(plain, of)]
        if isinstance(of, set | frozenset):
            return [type(of).__name__, *sorted(map(plain, of), key=repr)]
        if isinstance(of, Mapping):
            return [type(of).__name__, *([plain(key), plain(value)] for key, value in dict(of).items())]
        if id(of) in numbers:
            return ["the object", numbers[id(of)]]
        numbers[id(of)] = len(numbers)
        return [type(of).__name__, *([name, plain(value)] for name, value in _attributes(of))]

    return [plain(each) for each in objects]


def _attributes(of: Any) -> Iterator[tuple[str, Any]]:
    kind = type(of)
    if kind.__module__ == "kvtier_core._native":
        yield from _native(of)
    elif kind.__module__.startswith("kvtier_"):
        slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
        for name in (*slots, *getattr(of, "__dict__", ())):
            if hasattr(of, name) and not name.startswith("__"):
                yield name, getattr(of, name)


def _native(of: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(of, "victims"):
        yield "victims", list(of.victims())
        yield "state", of.save()
    elif hasattr(of, "parent"):
        yield "keys", {key: (of.nbytes(key), of.place(key), of.parent(key), of.children(key)) for key in sorted(of)}


#: Tables that are empty when nothing is asked and nobody holds anything.
_OF_HOLDERS = {
    "_by_holder",
    "_reservations",
    "_waiting",
    "_self_test_keys",
    "_reserved",
    "_pinned",
    "_pins",
    "_invalidated",
    "_since",
}
_OF_CALLS = {"in_use", "invalidated", "_holders", "_unusable", "_reading", "_sealing", "_waiting_for_room", "_queries"}
_KINDS = {"dict", "set", "list", "deque", "Counter", "OrderedDict"}


def not_empty(*objects: Any) -> Iterator[str]:
    """The tables of these objects that have something in them though nothing is asked and nobody holds anything."""

    def walk(of: Any) -> Iterator[str]:
        if isinstance(of, list):
            name, held = of if len(of) == 2 else ("", [])
            if isinstance(name, str) and name in _OF_HOLDERS | _OF_CALLS and held[0] in _KINDS and len(held) > 1:
                yield f"{name}: {held!r:.300}"
            for each in of:
                yield from walk(each)

    yield from walk(tables(*objects))


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Where two of these differ, in words."""
    if not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
        if before != after:
            yield f"{where}: {before!r:.300} became {after!r:.300}"
        return
    named = len(before) == 2 and isinstance(before[0], str | bytes)
    for number, pair in enumerate(zip(before, after, strict=True)):
        yield from differences(*pair, f"{where}.{before[0]}" if named else f"{where}/{number}")
