"""python -m benchmarks [SECTION ...] [--write]

Sections: copies seals codecs disk redis mooncake peers fleet s3 hosts lookup served lmcache entries ttft hybrids
    noreuse misses
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import (
    codecs,
    copies,
    disk,
    entries,
    fleet,
    hosts,
    hybrids,
    lmcache_server,
    lookup,
    misses,
    mooncake_tier,
    noreuse,
    peers,
    redis_tier,
    s3_tier,
    seals,
    served,
    ttft,
)
from benchmarks.conditions import conditions, heading
from benchmarks.measure import progress

#: Those that move bytes come before those that start engines.
SECTIONS = {
    "copies": copies,
    "seals": seals,
    "codecs": codecs,
    "disk": disk,
    "redis": redis_tier,
    "mooncake": mooncake_tier,
    "peers": peers,
    "fleet": fleet,
    "s3": s3_tier,
    "hosts": hosts,
    "lookup": lookup,
    "served": served,
    "lmcache": lmcache_server,
    "entries": entries,
    "ttft": ttft,
    "hybrids": hybrids,
    "noreuse": noreuse,
    "misses": misses,
}
RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What kvtier costs, as ratios.")
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure; default: here")
    parser.add_argument("--write", action="store_true", help=f"also write benchmarks/{RESULTS.name}")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    began = conditions()
    printed = []
    for name in SECTIONS:
        if not arguments.sections or name in arguments.sections:
            for table in SECTIONS[name].tables(arguments.folder):
                printed.append(str(table))
    report = "\n\n".join(printed)
    print(report)
    if arguments.write:
        RESULTS.write_text(f"{heading('Results', 'python -m benchmarks', began)}\n\n{report}\n")
        progress(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
