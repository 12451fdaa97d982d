"""`kvtier top`: the status of running engines, again and again."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier_core.cli import engines, status
from kvtier_core.cli.output import FINE, Output
from kvtier_core.errors import BackendError

#: Home, and clear what is below.
_REDRAW = "\33[H\33[J"
#: By these events bytes come into a tier, and leave it for the engine or an arena. Of a frame that workers read from a
#: store both are told, so that the larger sum has all bytes once.
_SPEEDS = {"in GB/s": (sum, ("stored", "promoted", "written")), "out GB/s": (max, ("loaded", "read"))}


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("top", help="watch the tiers of running engines; --json: a line each time")
    engines.add_to(parser)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks; default: 1")
    parser.add_argument("--count", type=int, help="number of looks; default: until it is interrupted")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """Draws until it is interrupted, or has looked ``--count`` times.

    Raises BackendError if no engine answers at first. Later it waits for one.
    """
    before: list[dict[str, Any]] = []
    looks = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            now, silent = _look(options.socket)
            if not now and not looks:
                raise silent[0]
            _show(now, before, silent, output)
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
    output: Output,
) -> None:
    if output.as_json:
        print(json.dumps(now), file=output.stream, flush=True)
        return
    earlier = {snapshot["pid"]: snapshot for snapshot in before}
    lines = [
        line for each in now for line in (*status.lines(each, output, _speeds(each, earlier.get(each["pid"]))), "")
    ]
    lines += [output.paint(f"{error}; top waits for one", "bad") for error in silent]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().lines - 1  # the cursor is below, and a screen that scrolls flickers
        print(_REDRAW + "\n".join(lines[:room]), flush=True)
    else:
        print("\n".join(lines), flush=True)


def _speeds(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """GB/s into each tier and out of it between two snapshots; a dash if there are not two."""
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
