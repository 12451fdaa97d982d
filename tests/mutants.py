"""Takes each protection out of a copy of the sources, once: the test that is there for it must then fail.

    python tests/mutants.py [NAME ...]
    python tests/mutants.py --draw 20

docs/reliability.md names them. A draw takes that many, chosen by the commit, and those of the files that it changed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
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
#: Of the files that a commit changed, a draw takes no more: a commit that moves a room changes them all.
MOST_OF_CHANGED = 30


def survives(mutant: Mutant, copy: SourceCopy) -> str:
    """What the test said if it did not fail; empty if it did."""
    file = copy.folder / mutant.file
    source = file.read_text()
    if source.count(mutant.code) != 1:
        return f"{mutant.code!r} stands {source.count(mutant.code)} times in {mutant.file}"
    file.write_text(source.replace(mutant.code, mutant.instead))
    try:
        beside = [ROOT / mutant.beside] if mutant.beside else []
        environment = {**os.environ, "KVTIER_HANG": "120"}  # many die of waiting
        # Variants too: `make test` alone leaves them out.
        chosen = ["-x", "-q", "-m", "not dist", mutant.test]
        done = copy.test(chosen, environment, beside, capture_output=True, text=True)
    finally:
        file.write_text(source)
    said = f"pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
    return "" if done.returncode == 1 else said


def outcomes(mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """What `survives` says of each, in order."""
    with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as folder, ThreadPoolExecutor(PARALLEL) as pool:
        copies: SimpleQueue[SourceCopy] = SimpleQueue()
        for number in range(PARALLEL):
            Path(folder, str(number)).mkdir()
            copies.put(SourceCopy(Path(folder, str(number)), extension.__file__))

        def tried(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return survives(mutant, copy)
            finally:
                copies.put(copy)

        yield from zip(mutants, pool.map(tried, mutants), strict=True)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def drawn(count: int) -> list[Mutant]:
    """By the commit, so that it is the same again. A merge has changed what it brought to its first parent."""
    changed = git("show", "--first-parent", "--diff-merges=first-parent", "--name-only", "--format=").splitlines()
    chance = random.Random(git("rev-parse", "HEAD"))
    chosen = chance.sample(MUTANTS, count)
    of_changed = [mutant for mutant in MUTANTS if mutant.file in changed and mutant not in chosen]
    return chosen + chance.sample(of_changed, min(MOST_OF_CHANGED, len(of_changed)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--draw", type=int, metavar="COUNT")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    named = [mutant for mutant in MUTANTS if mutant.name in asked.names]
    chosen = drawn(asked.draw) if asked.draw else named or MUTANTS
    survivors = 0
    for mutant, said in outcomes(chosen):
        print(f"{'SURVIVES' if said else 'dies    '}  {mutant.name}", flush=True)
        if said:
            survivors += 1
            print(said)
    print(f"{len(chosen)} mutants, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
