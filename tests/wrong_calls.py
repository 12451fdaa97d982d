"""Calls of a stack that are wrong, each in one way: all are refused, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.outcomes import ANY
from kvtier_core.types import ChunkKey, FrameRead, Location, ReadStatus, StoredFrame

#: A name that has nothing, and a key that nobody has reserved or stored.
STRANGER = "stranger"
UNKNOWN = ChunkKey(b"nobody has reserved this one key")
UNREAD = FrameRead(ReadStatus.CORRUPT, "a checksum")


class Known(NamedTuple):
    """What some holders of a stack have."""

    layout: ChunkLayout
    path: Sequence[ChunkKey]  #: of chunks that may be anywhere
    reserved: Mapping[str, Sequence[ChunkKey]]  #: by holder
    frames: Mapping[str, Sequence[StoredFrame]]  #: found for each holder, whose load has not begun


Arguments = dict[str, Any]


def _commits(known: Known) -> list[Arguments]:
    """Chunks that another holder has reserved, that nobody has, that are named twice; and other checksums."""
    sums = [0] * known.layout.shards
    wrong: list[Arguments] = [{"holder": STRANGER, "checksums": None, "empty": []}]
    for holder, own in known.reserved.items():
        others = [key for other, keys in known.reserved.items() if other != holder for key in keys]
        wrong.append({"holder": STRANGER, "checksums": None, "empty": own})
        for foreign in [UNKNOWN, *others]:
            wrong.append({"holder": holder, "checksums": None, "empty": [*own, foreign]})
            wrong.append({"holder": holder, "checksums": {own[0]: sums, foreign: sums}, "empty": []})
        wrong.append({"holder": holder, "checksums": None, "empty": [own[0], own[0]]})
        wrong += [
            {"holder": holder, "checksums": {own[0]: each}, "empty": []}
            for each in ([], sums[1:], [*sums, 0], [*sums[1:], 1 << 32], [*sums[1:], -1])
            if len(each) != len(sums) or any(each)
        ]
    return wrong


def _paths(known: Known) -> list[Sequence[ChunkKey]]:
    """That name a chunk twice, or have what is no key."""
    path = list(known.path)
    return [[*path, path[0]], [path[0], *path], [UNKNOWN, UNKNOWN], [UNKNOWN[:31]], [*path, ChunkKey(b"")]]


def _reserves(known: Known) -> list[Arguments]:
    """Such paths, and parts that are none, or named twice, or chunks of the path."""
    rest = {"holder": STRANGER, "salt": b"", "promised_to": ""}
    parts = [[UNKNOWN], [known.path[0]], [UNKNOWN, UNKNOWN], [UNKNOWN[:31]]]
    return [
        *({"path": path, "parts": [], **rest} for path in _paths(known)),
        *({"path": known.path, "parts": each, **rest} for each in parts),
    ]


def _load_begins(known: Known) -> list[Arguments]:
    """Frames that were not found for the holder, or that are another's, elsewhere, or named twice."""
    forged = StoredFrame("tier0", Location((0,), 4096), UNKNOWN, bytes(32))
    wrong: list[Arguments] = [{"frames": [forged], "holder": STRANGER}]
    for holder, frames in known.frames.items():
        moved = frames[0]._replace(location=Location(("another place",), frames[0].location.nbytes))
        wrong.append({"frames": frames, "holder": STRANGER})
        wrong += [
            {"frames": each, "holder": holder}
            for each in ([*frames, forged], [*frames, frames[0]], [moved], [frames[0]._replace(tier="another")])
        ]
    return wrong


def _load_ends(known: Known) -> list[Arguments]:
    """Frames that nobody is reading for the holder."""
    wrong: list[Arguments] = [{"holder": STRANGER, "unread": {UNKNOWN: UNREAD}, "ok": ok} for ok in (False, True)]
    for holder, frames in known.frames.items():
        wrong.append({"holder": holder, "unread": {frames[0].key: UNREAD}, "ok": False})
    return wrong


def _self_tests(known: Known) -> list[Arguments]:
    return [{"holder": STRANGER, "count": count} for count in (0, -1, known.layout.self_test_slots + 1, 256)]


def _of_paths(known: Known, **rest: Any) -> list[Arguments]:
    return [{"path": path, **rest} for path in _paths(known)]


#: By the name of the call.
WRONG: dict[str, Callable[[Known], list[Arguments]]] = {
    "on_request": lambda known: _of_paths(known, hints={}, salt=b""),
    "prefetch": lambda known: _of_paths(known, terms=ANY),
    "lookup": lambda known: _of_paths(known, holder=STRANGER, terms=ANY),
    "reserve": _reserves,
    "commit": _commits,
    "load_begins": _load_begins,
    "load_ended": _load_ends,
    "stop_direct_reads": lambda known: [{"tier": tier, "why": "no GPU"} for tier in ("", "none", "arena0")],
    "reserve_self_test_slots": _self_tests,
}
