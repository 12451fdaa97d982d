"""python -m benchmarks [SECTION ...] [--write | --short]"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.conditions import conditions, heading
from benchmarks.measure import SHORT_FORM, Table, progress

#: The module of each. Those that move bytes come before those that start engines.
SECTIONS = {
    "copies": "benchmarks.copies",
    "seals": "benchmarks.seals",
    "codecs": "benchmarks.codecs",
    "disk": "benchmarks.disk",
    "redis": "benchmarks.redis_tier",
    "mooncake": "benchmarks.mooncake_tier",
    "peers": "benchmarks.peers",
    "fleet": "benchmarks.fleet",
    "s3": "benchmarks.s3_tier",
    "hosts": "benchmarks.hosts",
    "lookup": "benchmarks.lookup",
    "served": "benchmarks.served",
    "lmcache": "benchmarks.lmcache_server",
    "entries": "benchmarks.entries",
    "ttft": "benchmarks.ttft",
    "hybrids": "benchmarks.hybrids",
    "noreuse": "benchmarks.noreuse",
    "misses": "benchmarks.misses",
}
RESULTS = Path(__file__).with_name("RESULTS.md")
INTERRUPTED = 130  #: the exit status of a program that SIGINT ended


def main(arguments: Sequence[str] | None = None, sections: Mapping[str, str] = SECTIONS) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What kvtier costs, as ratios.")
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(sections)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure; default: here")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--write", action="store_true", help=f"also write benchmarks/{RESULTS.name}")
    form.add_argument("--short", action="store_true", help="one small round of everything, which measures nothing")
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    if given.short:
        os.environ[SHORT_FORM] = "1"  # sections read it when they are imported
        print("The short form: it shows that the benchmarks run. Its figures mean nothing.\n", flush=True)
    began = conditions()
    printed, failed = [], []
    chosen = [name for name in sections if not given.sections or name in given.sections]
    for number, name in enumerate(chosen):
        try:
            for table in importlib.import_module(sections[name]).tables(given.folder):
                printed.append(_show(table))
        except Exception:  # noqa: BLE001 - the other sections can still be run
            traceback.print_exc()
            progress(f"{name}: failed")
            failed.append(name)
        except KeyboardInterrupt:
            left = ", ".join(chosen[number + 1 :]) or "none"
            progress(f"interrupted: {name} has not ended; sections that were not run: {left}")
            return INTERRUPTED
    if failed:
        progress(f"failed: {', '.join(failed)}")
    elif given.write:
        RESULTS.write_text("\n\n".join([heading("Results", "python -m benchmarks", began), *printed]) + "\n")
        progress(f"wrote {RESULTS}")
    return bool(failed)


def _show(table: Table) -> str:
    text = str(table)
    print(f"{text}\n", flush=True)
    return text


if __name__ == "__main__":
    sys.exit(main())
