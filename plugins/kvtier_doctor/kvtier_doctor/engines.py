"""Asks running engines over their status sockets."""

from __future__ import annotations

import argparse
import json
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtier_core.cli.output import FINE, PROBLEMS, Output
from kvtier_core.errors import BackendError
from kvtier_core.storekit.user_folders import runtime_folder
from kvtier_core.telemetry.status_page import PATTERN

#: Seconds that an engine may take to answer. An engine that computes a long prompt answers questions to its owner only
#: after that step; an idle one, with its next request.
_PATIENCE = 9.0
#: What a `kvtier serve` sends first, for engines.
_SERVER = b"kvtier:\n"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the option by which an engine is named."""
    parser.add_argument(
        "--socket", type=Path, help="the socket of an engine; default: every engine of this user on this machine"
    )


def found(named: Path | None) -> list[Path]:
    """The sockets to ask. Raises BackendError if there are none."""
    if named:
        return [named]
    try:
        folder = runtime_folder(trial=True)
    except OSError as error:
        raise BackendError(f"{error}; pass the socket of an engine with --socket") from error
    sockets = sorted(path for path in folder.glob(PATTERN) if path.is_socket())
    if not sockets:
        raise BackendError(
            f"no engine socket in {folder}: is an engine running with kvtier, as this user, with the same "
            "XDG_RUNTIME_DIR? Its log says 'kvtier: status at …'; pass that path with --socket"
        )
    return sockets


def tell(
    asked: dict[str, Any],
    options: argparse.Namespace,
    output: Output,
    lines: Callable[[Mapping[str, Any]], Iterable[str]],
) -> int:
    """Ask each engine, and print the answers, for people by ``lines``. Raises BackendError if none answers."""
    paths, answers, errors = found(options.socket), {}, []
    for path in paths:
        try:
            answers[str(path)] = ask(path, asked)
        except BackendError as error:
            errors.append(error)
    if not answers:
        raise errors[0]
    output.value = answers
    for where, told in answers.items():
        output.say(*([where] if len(paths) > 1 else []), *lines(told))
    for each in errors:
        output.warn(str(each))
    return PROBLEMS if errors else FINE


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of an engine. Raises BackendError."""
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            # If other clients also wait for the engine, connecting with a Python timeout would fail immediately.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_PATIENCE), 0))
            connection.connect(str(path))
            connection.settimeout(_PATIENCE)
            connection.sendall(json.dumps(question).encode() + b"\n")
            while piece := connection.recv(1 << 16):
                received += piece
                if received.startswith(_SERVER):
                    raise BackendError(f"{path} is the socket of a server; run kvtier serve status --socket {path}")
        answer = json.loads(received) if received else None
    except TimeoutError as error:
        why = "the engine is idle or busy, and answers only during a step; retry while it serves requests"
        raise BackendError(f"{path}: no answer within {_PATIENCE:g} s: {why}") from error
    except (OSError, ValueError) as error:
        raise BackendError(f"{path}: no engine answers: {error}; it may have exited, see its log") from error
    if not isinstance(answer, dict):
        raise BackendError(f"{path}: the engine closed the connection without an answer; retry")
    if "error" in answer:
        raise BackendError(f"{path}: {answer['error']}")
    return answer
