"""`kvtier top`: the status of running engines, shown repeatedly."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier_core.cli.output import FINE, Output
from kvtier_core.errors import BackendError
from kvtier_doctor import engines, status

#: Cursor to the top left; clear everything after it.
_REDRAW = "\33[H\33[J"
#: The events with which bytes enter a tier, and leave it for the engine or an arena. A frame that workers read from a
#: store has both of the latter, so the larger sum has all bytes once.
_SPEEDS: Mapping[str, tuple[Callable[[list[int]], int], Sequence[str]]] = {
    "in GB/s": (sum, ("stored", "promoted", "written")),
    "out GB/s": (max, ("loaded", "read")),
}


#: The snapshots now, and why others are missing.
Look = Callable[[], tuple[list[dict[str, Any]], list[BackendError]]]
#: The lines of a snapshot for people; the second argument is an earlier snapshot of the same engine, if there is one.
Lines = Callable[[Mapping[str, Any], Mapping[str, Any] | None], Iterable[str]]


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "top",
        help="watch the tiers of running engines",
        description="Show the tiers of running engines, and the speeds of their bytes, once a second; with --json, one "
        "line each time. On a terminal it waits for an engine that has ended, elsewhere it ends with the last one.",
    )
    engines.add_to(parser)
    add_watch_to(parser)
    parser.set_defaults(run=run)


def add_watch_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of `watch`."""
    parser.add_argument("--every", type=float, default=1.0, help="seconds between updates; default: 1")
    parser.add_argument("--count", type=int, help="number of updates; default: until interrupted")


def run(options: argparse.Namespace, output: Output) -> int:
    """Watch the engines of this user. Raises BackendError if no engine answers at first."""

    def lines(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterable[str]:
        return status.lines(now, output, speeds(now, before))

    return watch(lambda: _look(options.socket), lines, options, output)


def watch(look: Look, lines: Lines, options: argparse.Namespace, output: Output) -> int:
    """Draw until interrupted, at most ``--count`` times.

    Raises BackendError if the first look gets no answer, and later too, but not on a terminal, where it waits for one.
    """
    before: list[dict[str, Any]] = []
    looks = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            now, silent = look()
            if not now and not (looks and sys.stdout.isatty()):
                raise silent[0]
            _show(now, before, silent, lines, output)
            before, looks = now, looks + 1
            if looks == options.count:
                break
            time.sleep(options.every)
    return FINE


def _look(socket: Path | None) -> tuple[list[dict[str, Any]], list[BackendError]]:
    """The snapshots of all engines that answer, and why others do not."""
    now, silent = [], []
    try:
        paths = engines.found(socket)
    except BackendError as error:
        return [], [error]
    for path in paths:
        try:
            now.append(engines.ask(path, {"status": True}))
        except BackendError as error:
            silent.append(error)
    return now, silent


def _show(
    now: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]],
    silent: Sequence[BackendError],
    lines: Lines,
    output: Output,
) -> None:
    if output.as_json:
        print(json.dumps(now), file=output.stream, flush=True)
        return
    earlier = {_which(snapshot): snapshot for snapshot in before}
    shown = [line for each in now for line in (*lines(each, earlier.get(_which(each))), "")]
    shown += [output.paint(f"{error}; top waits for one", "bad") for error in silent]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().lines - 1  # the cursor is below, and a screen that scrolls flickers
        print(_REDRAW + "\n".join(shown[:room]), flush=True)
    else:
        print("\n".join(shown), flush=True)


def _which(snapshot: Mapping[str, Any]) -> Any:
    """The engine, or the boot of a server, that a snapshot describes."""
    return snapshot.get("pid", snapshot.get("boot"))


def speeds(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """GB/s into each tier and out of it between two snapshots; a dash if one is missing."""
    seconds = now["at"] - before["at"] if before else 0.0
    earlier = {tier["tier"]: tier for tier in before["tiers"]} if before else {}
    return {
        head: [
            f"{(of(_nbytes(tier, kinds)) - of(_nbytes(earlier[tier['tier']], kinds))) / seconds / 1e9:.2f}"
            if seconds > 0 and tier["tier"] in earlier
            else "-"
            for tier in now["tiers"]
        ]
        for head, (of, kinds) in _SPEEDS.items()
    }


def _nbytes(tier: Mapping[str, Any], kinds: Sequence[str]) -> list[int]:
    return [tier["events"].get(kind, {}).get("nbytes", 0) for kind in kinds]
