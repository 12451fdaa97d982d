"""python -m benchmarks.gpu_sections NAME: one section of the GPU check, as lines of JSON. See `gpu_report`."""

from __future__ import annotations

import functools
import mmap
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from benchmarks.gpu_report import ROOT, lines_of
from benchmarks.measure import Table
from kvtier_core.work.io_pool import run

Items = Iterator[Table | str]


class Tally(Protocol):
    """What the engine of tests/device_engine says in the end."""

    requests: int
    steps: int
    asked_tokens: int
    loaded_tokens: int
    failed_loads: int
    aborted: int
    preempted: int
    fenced: int


def engines(serve: Mapping[str, Callable[[], Tally]]) -> Items:
    """The engine of tests/device_engine from end to end, by kind; whatever it raises is a problem."""
    rows: list[list[object]] = []
    problems: list[str] = []
    for kind, work in serve.items():
        begin = time.perf_counter()
        outcome = run(work)
        seconds = time.perf_counter() - begin
        if outcome.error is not None:
            problems.append(f"{kind}: {type(outcome.error).__name__}: {outcome.error}")
            rows.append([kind, "failed", "", "", "", "", "", "", seconds])
            continue
        tally = outcome.value
        share = tally.loaded_tokens / tally.asked_tokens
        counts = [tally.requests, tally.steps, share, tally.fenced, tally.preempted, tally.aborted, tally.failed_loads]
        rows.append([kind, *counts, seconds])
        if not tally.loaded_tokens:
            problems.append(f"{kind}: nothing was loaded")
    yield Table(
        "Engine",
        "Two processes and more, with the real scheduler side, worker side and arena. The forward, in a CUDA graph, "
        "compares every token that it reads; no token was wrong where a row has figures. Tokens loaded are by those "
        "of all prompts; a request that is preempted may load them again. Seconds with the start of the processes.",
        ("engine", "requests", "steps", "tokens loaded", "fences", "preempted", "aborted", "failed loads", "s"),
        rows,
    )
    yield from problems


def planted(serve: Mapping[str, Callable[[], Tally]]) -> Items:
    """The same with a bug each, which the engine must notice."""
    rows = []
    for bug, work in serve.items():
        error = run(work).error
        rows.append([bug, "not noticed" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0]}"])
    yield Table(
        "Planted bugs",
        "On a real device it is a matter of time whether an order that nobody keeps is broken; each of these and all "
        "others are noticed on a simulated one, tests/engine/test_device_engine.py.",
        ("bug", "what came of it"),
        rows,
    )


def machine() -> Items:
    """What is checked, and with what."""
    import torch

    from kvtier_core.transfer.cuda.library import load

    query = "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current"
    facts = {
        "device": _said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "toolkit": _said("nvcc", "--version").splitlines()[-1],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "kernel": platform.release(),
        "page size": f"{mmap.PAGESIZE} bytes",
        "python": platform.python_version(),
        "kvtier": str(load().device(0).abilities),
    }
    yield Table("Machine", "What was checked.", ("what", "is"), list(facts.items()))


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or "it said nothing"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"


def _copies() -> Items:
    from benchmarks import gpu_copies

    return gpu_copies.tables()


def _checksums() -> Items:
    from benchmarks import gpu_checksums

    return gpu_checksums.tables()


def _packing() -> Items:
    from benchmarks import gpu_packing

    return gpu_packing.tables()


def _effects() -> Items:
    from benchmarks import gpu_effects

    return gpu_effects.tables()


def _direct_reads() -> Items:
    from benchmarks import gpu_direct_reads

    return gpu_direct_reads.tables(ROOT / "build")


def _engines() -> Items:
    from device_engine import engine, on_gpu

    return engines({name: functools.partial(engine.run, each, on_gpu.REQUESTS) for name, each in on_gpu.KINDS.items()})


def _planted() -> Items:
    from device_engine import engine, on_gpu

    return planted(
        {name: functools.partial(engine.run, each, on_gpu.REQUESTS) for name, each in on_gpu.PLANTED.items()}
    )


SECTIONS: dict[str, Callable[[], Items]] = {
    "machine": machine,
    "engine": _engines,
    "checksums": _checksums,
    "packing": _packing,
    "effects": _effects,
    "copies": _copies,
    "direct reads": _direct_reads,
    "planted": _planted,
}

if __name__ == "__main__":
    for line in lines_of(SECTIONS[sys.argv[1]]()):
        print(line, flush=True)
