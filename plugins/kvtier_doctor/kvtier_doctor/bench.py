"""`kvtier bench FILE`: this stack on this machine against the limits of its hardware, both measured in the same run."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.cli.output import FINE, Output, table
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig, StoreTierConfig
from kvtier_core.config.open import OpenedTier
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.layouts import ChunkLayout
from kvtier_core.storekit.files import read_files, ring_works, write_files
from kvtier_core.storekit.folder import folders
from kvtier_doctor import tiers
from kvtier_doctor.measure import Frames, aligned, copied, median
from kvtier_doctor.stores import opened


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure the store tiers against memcpy and raw files of the same bytes",
        description="Measure the store tiers of a file on this machine. Each figure stands beside a copy in memory of "
        "the same bytes and, for a folder, one plain file of them in it, measured in the same run.",
    )
    parser.add_argument("file")
    parser.add_argument("--model", type=Path, help="the folder of the model, which decides the size of a frame")
    parser.add_argument("--frames", type=int, default=32, help="frames in a batch; default: 32")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts; default: 5")
    parser.set_defaults(run=run)


@attrs.frozen
class Figure:
    """Bytes per second: the median, and the slowest and fastest round."""

    what: str
    rate: float
    slowest: float
    fastest: float

    @classmethod
    def of(
        cls, what: str, nbytes: int, rounds: int, work: Callable[[], None], before: Callable[[], object] = lambda: None
    ) -> Figure:
        """Measure ``work``, which moves ``nbytes`` bytes; ``before`` runs before each round and is not timed."""
        taken, least, most = median(work, rounds, before)
        return cls(what, nbytes / taken, nbytes / most, nbytes / least)


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for each thing that was measured. Raises ConfigError and BackendError."""
    config = load_config(options.file, Registry.discover())
    stores = enumerate(config.tiers)
    numbers = [i for i, tier in stores if isinstance(tier, StoreTierConfig) and not tier.config.read_only]
    if not numbers:
        raise BackendError(f"{options.file}: no tier below its arenas to measure")
    config, layout = tiers.sized(config, tiers.kv_of(options.model, output))
    nbytes = options.frames * layout.frame_nbytes
    memcpy = Figure.of("memcpy", nbytes, options.rounds, copied(nbytes))
    rows = [_row("memory", memcpy, memcpy, None)]
    for number in numbers:
        rows += _of_tier(config, number, layout, options, memcpy)
    output.value = {"frame_nbytes": layout.frame_nbytes, "frames": options.frames, "figures": rows}
    output.say(f"{options.frames} frames of {layout.frame_nbytes:,} bytes, median of {options.rounds}", "")
    output.say(
        *table(("tier", "what", "GB/s", "slowest", "fastest", "of memcpy", "of raw"), list(map(_cells, rows)), 2)
    )
    return FINE


def _of_tier(
    config: StackConfig, number: int, layout: ChunkLayout, options: argparse.Namespace, memcpy: Figure
) -> Iterator[dict[str, Any]]:
    with opened(config, layout, number) as tier, Frames(tier, layout, options.frames) as frames:
        raw = _raw_figures(tier, frames.nbytes, options.rounds)
        yield from (_row(tier.tier.name, figure, memcpy, None) for figure in raw.values())
        write = Figure.of("write", frames.nbytes, options.rounds, frames.write, frames.rename)
        yield _row(tier.tier.name, write, memcpy, raw.get("write"))
        read = Figure.of("read", frames.nbytes, options.rounds, frames.read)
        yield _row(tier.tier.name, read, memcpy, raw.get("read"))
        verify = Figure.of("verify", frames.nbytes, 1, frames.verify)  # once: then it is in place, and decoded
        yield _row(tier.tier.name, verify, memcpy, None)


def _raw_figures(tier: OpenedTier, nbytes: int, rounds: int) -> dict[str, Figure]:
    """The figures of one plain file of the same size, in the tier's folder; empty for a tier without a folder."""
    found = folders(tier.tier)
    if not found:
        return {}
    file, memory, ring = found[0] / f".kvtier-bench-{secrets.token_hex(8)}", aligned(nbytes), ring_works()

    def write() -> None:
        with _opened(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            write_files([fd], [memory], ring=ring)

    def read() -> None:
        with _opened(file, os.O_RDONLY) as fd:
            read_files([fd], [memory], ring=ring)

    try:
        return {
            "write": Figure.of("raw file, write", nbytes, rounds, write, lambda: file.unlink(missing_ok=True)),
            "read": Figure.of("raw file, read", nbytes, rounds, read),
        }
    except OSError as error:
        raise BackendError(f"{file}: {error.strerror}") from error
    finally:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    """Open a file, bypassing the page cache where its file system supports that."""
    try:
        fd = os.open(file, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        if flags & os.O_CREAT:  # some file systems create it all the same
            file.unlink(missing_ok=True)
        fd = os.open(file, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _row(tier: str, figure: Figure, memcpy: Figure, raw: Figure | None) -> dict[str, Any]:
    return {
        "tier": tier,
        **attrs.asdict(figure),
        "of_memcpy": figure.rate / memcpy.rate,
        "of_raw": raw and figure.rate / raw.rate,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    rates = [f"{row[name] / 1e9:.2f}" for name in ("rate", "slowest", "fastest")]
    return [
        row["tier"],
        row["what"],
        *rates,
        f"{row['of_memcpy']:.2f}",
        f"{row['of_raw']:.2f}" if row["of_raw"] else "",
    ]
