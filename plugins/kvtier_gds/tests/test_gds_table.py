"""The table of a slab, whatever is in it, and the frames and the free bytes that are found by it."""

from __future__ import annotations

import itertools
import random

import pytest
from slabs import NBYTES, held, open_slabs, records, whole, write

from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_gds import table
from kvtier_gds.table import Record, Table, gaps, without_overlaps
from kvtier_testing.samples import make_keys

KEYS = make_keys(64)
TOTAL = 64 * FRAME_ALIGNMENT


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """Makes a table in which every fifth record is damaged; returns it, and the records that are not."""
    monkeypatch.setattr(table, "_READ_NBYTES", 5 * table.RECORD_NBYTES)
    file = (tmp_path / "table").open("w+b", buffering=0)

    def fill(entries):
        for number, (entry, record) in enumerate(entries.items()):
            Table(file.fileno()).put(entry, record)
            if number % 5 == 4:
                file.seek(entry * table.RECORD_NBYTES + 8)
                file.write(b"damaged")
        return Table(file.fileno()), dict(pair for number, pair in enumerate(entries.items()) if number % 5 != 4)

    yield fill
    file.close()


def drawn(seed, longest):
    """Records of frames of up to so many pages, at any place within a slab and a little beyond, in any entries."""
    draw = random.Random(seed)
    return {
        entry: Record(
            bytes([entry] * 32),
            KEYS[entry],
            draw.randrange(66) * FRAME_ALIGNMENT,
            draw.randint(1, longest) * FRAME_ALIGNMENT,
            draw.randrange(20),
        )
        for entry in draw.sample(range(len(KEYS)), draw.randrange(30))
    }


def end(record):
    return record.at + record.nbytes


def overlap(one, other):
    return one.at < end(other) and other.at < end(one)


def pieces(extents):
    """The slab, divided where these begin and end."""
    return list(itertools.pairwise(sorted({0, TOTAL, *itertools.chain(*extents)})))


def by_entry(found):
    return {entry: Record(*fields) for entry, *fields in found.tolist()}


@pytest.mark.parametrize("longest", [1, 4, 40])
@pytest.mark.parametrize("seed", range(30))
def test_of_any_records_those_count_that_are_whole_and_within_and_overlap_no_newer_one(filled, seed, longest):
    table, good = filled(drawn(seed, longest))
    found = table.records()
    assert by_entry(found) == good
    kept = without_overlaps(found, TOTAL)
    left = by_entry(kept)
    assert left.items() <= good.items()
    assert list(left.values()) == sorted(left.values(), key=lambda record: record.at)
    assert not any(overlap(one, other) for one in left.values() for other in left.values() if one is not other)
    within = {entry: record for entry, record in good.items() if end(record) <= TOTAL}
    assert left.keys() <= within.keys()
    for entry in within.keys() - left.keys():
        rivals = [record for other, record in within.items() if other != entry and overlap(record, within[entry])]
        assert max(record.order for record in rivals) >= within[entry].order
    taken = [(record.at, end(record)) for record in left.values()]
    free = gaps(kept, TOTAL)
    assert sorted([*free, *taken]) == sorted(pieces([*free, *taken])), "every byte is in one of them"


@pytest.mark.parametrize("changes", [{"at": (1 << 64) - FRAME_ALIGNMENT}, {"nbytes": (1 << 64) - FRAME_ALIGNMENT}])
def test_a_frame_does_not_end_before_it_begins(tmp_path, changes):
    """Not even where 64 bits do not hold its end."""
    backend = open_slabs(tmp_path)
    write(backend, *KEYS[:2])
    backend.close()
    entry, record = next(pair for pair in records(tmp_path).items() if pair[1].key == KEYS[1])
    with open(tmp_path / "kvtier.table", "r+b") as file:
        Table(file.fileno()).put(entry, record._replace(**changes))
    backend = open_slabs(tmp_path)
    assert held(backend) == [KEYS[0]]
    write(backend, *KEYS[2:9])
    assert all(whole(backend, key) for key in [KEYS[0], *KEYS[2:9]])
    backend.close()


def test_frames_of_many_entries_are_listed_with_their_lengths(tmp_path):
    """In two slabs, of which one has more frames than the other, with entries that were used before."""
    paths = [tmp_path / "a", tmp_path / "b"]
    backend = open_slabs(*paths, frames=24)
    write(backend, *KEYS[:20])
    backend.delete(KEYS[3:15])
    write(backend, *KEYS[30:34])
    expected = [*KEYS[:3], *KEYS[15:20], *KEYS[30:34]]
    assert list(backend.scan()) == [(key, NBYTES) for key in expected]
    backend.close()
    again = open_slabs(*paths, frames=24)
    assert list(again.scan()) == [(key, NBYTES) for key in expected]
    assert all(whole(again, key) for key in expected)
    write(again, *KEYS[40:52])
    assert all(whole(again, key) for key in [*expected, *KEYS[40:52]])
    again.close()
