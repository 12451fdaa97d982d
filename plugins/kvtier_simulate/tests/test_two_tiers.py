"""Memory and a disk below it, written through: figures of one run on the bundled extract, and what must hold of them.

Memory for 1 and a disk for 10 in a hundred of the distinct chunks; what a prompt waits for is reckoned as `kvtier
simulate` does if nobody says otherwise. The extract is short and mostly cold (1708 ms without any cache), so the
figures say that a decision changed, not how good it is: that was looked at on whole traces, in docs/eviction.md.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.types import KEY_NBYTES, ChunkKey
from kvtier_simulate.dry_run import Clock, frame_nbytes_in, open_dry_run
from kvtier_simulate.stacks import read_capacities, read_policies, stack_of
from kvtier_simulate.study import Study, layout_of
from kvtier_simulate.traces import Prompt, Trace, read_trace

#: That of Llama 3.1 8B in 16 bits, as on the command line.
BYTES_PER_TOKEN = 128 << 10
EXTRACT = Path(__file__).parents[3] / "tests" / "policies" / "traces" / "conversation.jsonl"


def run(trace, capacity, policy):
    """The tally of a stack, and how many chunks were written to its disk."""
    layout = layout_of(trace.chunk_tokens, BYTES_PER_TOKEN)
    capacities = read_capacities(capacity, trace, layout)
    policies = read_policies(policy, len(capacities), Registry.discover())
    tally = Study(trace, layout).run(stack_of(capacities, policies, trace.chunk_tokens))
    return tally, tally.written["disk"] // layout.frame_nbytes


@functools.cache
def of_extract(capacity, policy):
    return run(read_trace(EXTRACT), capacity, policy)


def figures(policy):
    """Mean prefill in milliseconds, and chunks written to disk."""
    tally, written = of_extract("1%+10%", policy)
    return round(tally.mean * 1000, 1), written


#: This file prints them when it is run.
GOLDEN = [
    ("lru", (1642.5, 17717)),
    ("gittins", (1621.3, 17355)),
]


@pytest.mark.parametrize(("policy", "seen"), GOLDEN)
def test_figures_are_those_of_the_run_that_was_looked_at(policy, seen):
    assert figures(policy) == seen


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_memory_above_a_disk_takes_no_hits_from_it(policy):
    """Whatever is written goes to both, so a disk alone, of the same size, would not have had more."""
    (both, _), (alone, _) = of_extract("1%+10%", policy), of_extract("10%", policy)
    assert both.hit_rate >= alone.hit_rate


def path_of(name, chunks):
    return tuple(ChunkKey(f"{name}{i}".encode().ljust(KEY_NBYTES)) for i in range(chunks))


def test_a_long_prompt_takes_the_room_of_the_oldest_paths_and_no_more():
    """Six paths of four chunks fill the disk. One of twelve comes, and takes the room of the first three."""
    paths = [*(path_of(name, 4) for name in "abcdef"), path_of("long", 12), *(path_of(name, 4) for name in "def")]
    trace = Trace("paths", 512, tuple(Prompt(float(at), len(path) * 512, path) for at, path in enumerate(paths)))
    frame = layout_of(512, BYTES_PER_TOKEN).frame_nbytes
    tally, written = run(trace, f"{12 * frame}B+{24 * frame}B", "lru")
    assert (tally.each[-3:], written) == ([4 * 512] * 3, 6 * 4 + 12)


if __name__ == "__main__":
    for each, _ in GOLDEN:
        print(f"    ({each!r}, {figures(each)}),")


@pytest.mark.parametrize(
    ("arena", "serializer", "more"),
    [
        ("off", "raw", (1, 1)),
        ("auto", "raw", (1.29, 1.29)),
        ("off", "packed", (1, 1.31)),
        ("auto", "packed", (1.29, 1.31)),
    ],
)
def test_packed_frames_take_less_room(tmp_path, arena, serializer, more):
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        f"version: 1\ntiers:\n  - {{type: cpu, capacity: 1GiB, packing: {arena}}}\n"
        f"  - {{type: disk, path: /nowhere, capacity: 8GiB, serializer: {serializer}}}\n"
    )
    config, layout = load_config(file, Registry.discover()), layout_of(512, 128 << 10)
    manager = open_dry_run(config, layout, Clock())
    arena, disk = manager.arenas[0], manager.tiers[0]
    assert arena.capacity / (2**30 // layout.frame_nbytes) == pytest.approx(more[0], abs=0.07)
    room = disk.usage().capacity // frame_nbytes_in(config, config.tiers[1], layout)
    assert room / (2**33 // layout.frame_nbytes) == pytest.approx(more[1], abs=0.01)
    manager.close()
