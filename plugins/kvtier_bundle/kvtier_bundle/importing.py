"""`kvtier import`: copies the frames of a bundle into a store tier."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from kvtier_bundle.format import frames_of, must_be_trusted, naming, read_head, without_waiting
from kvtier_bundle.forms import Form, moved, namespaces_of, opened
from kvtier_core.cli.output import FINE, Output
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, SupportsListing
from kvtier_core.outside import LONGEST_PATH, printable
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, Namespace, Nbytes, size
from kvtier_doctor.stores import store_tier


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "import",
        help="copy the frames of a bundle into a tier",
        description="Copy the frames of a bundle into a store tier. No engine may use the tier unless it is shared. "
        "Frames that are there already are left as they are, so that an interrupted import can be repeated.",
    )
    parser.add_argument("bundle", help="the file to read; - for standard input")
    parser.add_argument("tier", help="the name of a tier: its type, or disk#2 for the second of that type")
    parser.add_argument("--config", required=True, help="the configuration file that names the tier")
    parser.add_argument(
        "--new", action="store_true", help="also if the tier has frames, and none of the bundle's namespace"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """Prints a total. Raises ConfigError and BackendError."""
    tier, path = store_tier(options.config, options.tier), Path(options.bundle)
    with contextlib.ExitStack() as closing:
        with naming(path):
            file: BinaryIO = sys.stdin.buffer
            if options.bundle != "-":
                file = closing.enter_context(open(path, "rb", opener=without_waiting))
                must_be_trusted(file)
            in_bundle = read_head(file)
        form = Form.of_bundle(tier, in_bundle)
        if not options.new:
            _must_be_known(tier, form.namespace)
        frames = _frames(file, path, form)
        first = next(frames, None)
        if first is None:
            raise BackendError(f"{path}: a bundle without frames")
        store = opened(tier, form.namespace, nbytes=len(first[1]) - FRAME_HEADER_NBYTES)
        closing.callback(store.close)
        copied, there, nbytes = _copy(itertools.chain([first], frames), store, tier)
    output.say(f"{tier.name}: {copied} frames, {size(nbytes)}; {there} were there already")
    output.value = {"frames": copied, "nbytes": nbytes, "there": there}
    return FINE


def _must_be_known(tier: StoreTierConfig, namespace: Namespace) -> None:
    """Raise BackendError if the tier has frames, but none of this namespace."""
    there = namespaces_of(tier)
    if there and namespace not in there:
        differences = min((namespace.differences(each) for each in there), key=len)
        facts = ", ".join(f"{name} {ours or 'none'} instead of {its or 'none'}" for name, ours, its in differences)
        why = f"has frames, but none of the bundle's namespace: {printable(facts, LONGEST_PATH)}"
        raise BackendError(f"{tier.name}: {why}; pass --new to import it all the same")


def _frames(file: BinaryIO, path: Path, form: Form) -> Iterator[tuple[ChunkKey, bytes]]:
    """Keys and frames, as the tier stores them. Raises BackendError."""
    with naming(path):
        for header, frame in frames_of(file):
            key = ChunkKey(header.key)
            if fault := form.fault(frame, key, form.in_bundle):
                raise BackendError(f"its frame {key.hex()} is {fault.value}")
            yield key, moved(frame, header, form.namespace)


def _copy(frames: Iterable[tuple[ChunkKey, bytes]], store: Backend, tier: StoreTierConfig) -> tuple[int, int, int]:
    """Returns the number of frames that were copied, that of frames that were there, and the bytes that were copied."""
    copied = there = nbytes = 0
    room = None if tier.config.shared or tier.capacity is None else tier.capacity
    if room is not None and isinstance(store, SupportsListing):
        room = Nbytes(room - sum(length for _, length in store.scan()))
    for key, frame in frames:
        if store.contains([key])[0]:
            there += 1
            continue
        if room is not None and nbytes + len(frame) > room:
            why = f"no room after {copied} frames in its capacity of {tier.capacity}"
            raise BackendError(f"{tier.name}: {why}; raise it")
        for error in store.write([key], [memoryview(frame)]) or ():
            if error:
                raise error
        copied, nbytes = copied + 1, nbytes + len(frame)
    return copied, there, nbytes
