"""Whole stacks over one shared folder: what one engine stores another one loads."""

from __future__ import annotations

import contextlib

import pytest
from serving import FRAME, Serving

from kvtier_testing.samples import make_keys

CHUNKS = 4
PATHS = [make_keys(40 * CHUNKS)[i : i + CHUNKS] for i in range(0, 40 * CHUNKS, CHUNKS)]


def frames(tmp_path):
    return list(tmp_path.glob("kv/*/??/*.kv"))


@pytest.fixture
def engine(tmp_path):
    """Opens a stack with an arena of one path over the shared folder; all are closed afterwards."""
    with contextlib.ExitStack() as opened:

        def engine(capacity="", name="kvtier.yaml"):
            (tmp_path / name).write_text(
                f"version: 1\ntiers:\n  - {{type: cpu, capacity: {CHUNKS * FRAME}B}}\n"
                f"  - {{type: disk, path: {tmp_path / 'kv'}, shared: true, min_free: 0B{capacity}}}\n"
            )
            return opened.enter_context(Serving(tmp_path / name))

        yield engine


def test_engines_load_frames_of_each_other(engine):
    first, second = engine(), engine()
    assert [first.ask(path) for path in PATHS[:10]] == [0] * 10
    assert [second.ask(path) for path in PATHS[:10]] == [CHUNKS] * 10
    assert engine().ask(PATHS[0]) == CHUNKS


def test_a_frame_evicted_by_one_engine_is_a_miss_for_the_others(engine, tmp_path):
    bounded = f", capacity: {10 * CHUNKS * FRAME}B"
    first, second = engine(bounded), engine(bounded)
    for path in PATHS[:10]:
        first.ask(path)
    for path in PATHS[10:20]:
        second.ask(path)
    assert 9 * CHUNKS < len(frames(tmp_path)) <= 10 * CHUNKS
    assert first.ask(PATHS[0]) == 0
    assert first.ask(PATHS[19]) == CHUNKS
    assert "io_error" not in first.seen | second.seen


def test_a_damaged_frame_is_a_miss_for_all_and_put_right_by_the_first_that_stores_it(engine, tmp_path):
    first, second = engine(), engine()
    for path in PATHS[:2]:
        first.ask(path)
    for file in frames(tmp_path):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert second.ask(PATHS[0]) == 0
    assert "corrupt" in second.seen
    assert engine().ask(PATHS[0]) == CHUNKS
