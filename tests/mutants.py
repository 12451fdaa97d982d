"""Takes each protection out of a copy of the sources, once: the test that is there for it must then fail.

    python tests/mutants.py [NAME ...]
    python tests/mutants.py --since COMMIT

docs/reliability.md names them. Without names all are tried; with a commit those of the files that differ from it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from protections import MUTANTS
from protections.mutant import Mutant
from source_copy import ROOT, SourceCopy

from kvtier_core.native import extension

#: At a time.
PARALLEL = 2
#: Seconds after which what a test waits for is taken to hang: many mutants die of that.
HANG = 60


def survives(mutant: Mutant, copy: SourceCopy) -> str:
    """What the test said if it did not fail; empty if it did."""
    file = copy.folder / mutant.file
    source = file.read_text()
    if source.count(mutant.code) != 1:
        return f"{mutant.code!r} stands {source.count(mutant.code)} times in {mutant.file}"
    file.write_text(source.replace(mutant.code, mutant.instead))
    try:
        beside = [ROOT / mutant.beside] if mutant.beside else []
        environment = {**os.environ, "KVTIER_HANG": str(HANG)}
        # Variants too: `make test` alone leaves them out.
        options = ["-x", "-q", "-m", "not dist", "--assert=plain", "--hypothesis-profile", "mutant"]
        options += ["--timeout", str(2 * HANG), mutant.test]
        done = copy.test(options, environment, beside, capture_output=True, text=True)
    finally:
        file.write_text(source)
    said = f"pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
    return "" if done.returncode == 1 else said


def outcomes(mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """What `survives` says of each, in order, and how many seconds that took."""
    with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as folder, ThreadPoolExecutor(PARALLEL) as pool:
        copies: SimpleQueue[SourceCopy] = SimpleQueue()
        for number in range(PARALLEL):
            Path(folder, str(number)).mkdir()
            copies.put(SourceCopy(Path(folder, str(number)), extension.__file__))

        def tried(mutant: Mutant) -> tuple[Mutant, str, float]:
            copy = copies.get()
            started = time.monotonic()
            try:
                return mutant, survives(mutant, copy), time.monotonic() - started
            finally:
                copies.put(copy)

        yield from pool.map(tried, mutants)


def of_files_changed_since(commit: str) -> list[Mutant]:
    command = ["git", "diff", "--name-only", commit]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [mutant for mutant in MUTANTS if mutant.file in changed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--since", metavar="COMMIT")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    named = [mutant for mutant in MUTANTS if mutant.name in asked.names]
    chosen = of_files_changed_since(asked.since) if asked.since else named or MUTANTS
    survivors = 0
    for mutant, said, seconds in outcomes(chosen):
        print(f"{'SURVIVES' if said else 'dies    '} {seconds:5.0f} s  {mutant.name}", flush=True)
        if said:
            survivors += 1
            print(said)
    print(f"{len(chosen)} mutants, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
