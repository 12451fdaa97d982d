"""Takes each protection out of a copy of the sources, once: the test that is there for it must then fail.

    python tests/mutants.py [NAME ...]
    python tests/mutants.py --draw 20

docs/reliability.md names them. A draw takes that many, chosen by the commit, and all of the files that it changed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from protections import MUTANTS
from protections.mutant import Mutant
from source_copy import ROOT, SourceCopy

from kvtier_core.native import extension


def survives(mutant: Mutant) -> str:
    """What the test said if it did not fail; empty if it did."""
    with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as folder:
        copy = SourceCopy(Path(folder), extension.__file__)
        file = copy.folder / mutant.file
        source = file.read_text()
        if source.count(mutant.code) != 1:
            return f"{mutant.code!r} stands {source.count(mutant.code)} times in {mutant.file}"
        file.write_text(source.replace(mutant.code, mutant.instead))
        done = copy.test(["-x", "-q", mutant.test], capture_output=True, text=True)
        return "" if done.returncode == 1 else done.stdout[-2000:] + done.stderr[-1000:]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def drawn(count: int) -> list[Mutant]:
    changed = git("show", "--name-only", "--format=", "HEAD").splitlines()
    chance = random.Random(git("rev-parse", "HEAD"))
    chosen = {mutant.name for mutant in chance.sample(MUTANTS, count)}
    return [mutant for mutant in MUTANTS if mutant.name in chosen or mutant.file in changed]


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
    for mutant in chosen:
        said = survives(mutant)
        print(f"{'SURVIVES' if said else 'dies    '}  {mutant.name}", flush=True)
        if said:
            survivors += 1
            print(said)
    print(f"{len(chosen)} mutants, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
