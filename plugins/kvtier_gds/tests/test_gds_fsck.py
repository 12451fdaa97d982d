"""`kvtier fsck gds`."""

from __future__ import annotations

import pytest
from slabs import NBYTES, held, open_slabs, place_of, whole, write

from kvtier_core.cli import main
from kvtier_testing.samples import make_keys

TORN, SWAPPED, *GOOD = make_keys(6)


@pytest.fixture
def slabs(tmp_path):
    """Two folders with six frames, of which one is torn and one is another's."""
    paths = [tmp_path / "a", tmp_path / "b"]
    backend = open_slabs(*paths)
    write(backend, TORN, SWAPPED, *GOOD)
    backend.close()
    file, record = place_of(TORN, *paths)
    content = bytearray(file.read_bytes())
    content[record.at + NBYTES - 4096] ^= 1
    file.write_bytes(content)
    file, record = place_of(SWAPPED, *paths)
    other, source = place_of(GOOD[0], *paths)
    content = bytearray(file.read_bytes())
    content[record.at : record.at + NBYTES] = other.read_bytes()[source.at : source.at + NBYTES]
    file.write_bytes(content)
    return paths


@pytest.fixture
def fsck(tmp_path, slabs, capsys):
    file = tmp_path / "kvtier.yaml"
    tier = f"  - {{type: gds, capacity: 1MiB, paths: [{slabs[0]}, {slabs[1]}]}}\n"
    file.write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 1MiB}}\n{tier}")

    def run(*words):
        status = main(["fsck", "gds", "--config", str(file), *words])
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        return status, {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}

    return run


def test_fsck_of_whole_torn_and_foreign_frames(fsck, slabs):
    status, counts = fsck()
    assert status == 1
    assert (counts["whole"], counts["torn"], counts["orphaned"]) == (4, 1, 1)
    backend = open_slabs(*slabs)
    assert len(held(backend)) == 6, "it only looks"
    backend.close()


def test_repair_leaves_what_is_whole(fsck, slabs):
    assert fsck("--repair")[0] == 0
    assert fsck()[1]["whole"] == 4
    backend = open_slabs(*slabs)
    assert sorted(held(backend)) == sorted(GOOD)
    assert all(whole(backend, key) for key in GOOD)
    backend.close()


def test_fsck_is_refused_beside_an_engine(fsck, slabs):
    backend = open_slabs(*slabs)
    assert fsck()[0] == 2
    backend.close()
