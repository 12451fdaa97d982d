"""Stacks with slabs in them, from their files: alone, below memory, and above a bucket."""

from __future__ import annotations

import contextlib
import gc
import shutil

import attrs
import pytest
from servers.s3 import BUCKET, s3_server  # noqa: F401 - a fixture
from serving import FRAME, LAYOUT, Serving
from transfer.test_regroup import layout as by_head

import kvtier_gds.plugin
import kvtier_s3.plugin
from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.open import Runtime, open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.layouts import ChunkLayout, KVKind, frame_nbytes
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.types import FRAME_ALIGNMENT, StoredFrame
from kvtier_gds.backend import GdsBackend
from kvtier_gds.config import GdsConfig
from kvtier_testing.samples import make_context, make_group, make_keys, make_layout

CHUNKS = 4
PATHS = [make_keys(CHUNKS * 40)[i : i + CHUNKS] for i in range(0, CHUNKS * 40, CHUNKS)]
CPU = f"{{type: cpu, capacity: {CHUNKS * FRAME}B}}"
PLUGINS = [kvtier_gds.plugin, kvtier_s3.plugin]


@pytest.fixture
def stack(tmp_path):
    """Opens a stack of these tiers."""

    def start(*tiers):
        file = tmp_path / "kvtier.yaml"
        file.write_text("version: 1\nload: always\ntiers:\n" + "".join(f"  - {tier}\n" for tier in tiers))
        return Serving(file, *PLUGINS)

    return start


def slabs(tmp_path, *, frames=CHUNKS * 40, staging=CHUNKS * FRAME, more="mode: bounce"):
    paths = f"[{tmp_path / 'a'}, {tmp_path / 'b'}]"
    capacity = f"{frames * FRAME + (1 << 20)}B"
    return f"{{type: gds, paths: {paths}, capacity: {capacity}, staging: {staging}B, eviction: lru, {more}}}"


def stored(serving, paths):
    """How many chunks come back, in how many paths."""
    return [serving.ask(path) for path in paths]


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_rests_while_a_stack_opens(stack, tmp_path, monkeypatch, fails):
    """With a million frames it would take as long again."""
    collected, opened = [], GdsBackend.__init__

    def noted(backend, *arguments, **settings):
        collected.append(gc.isenabled())
        if fails:
            raise BackendError("no such drive")
        opened(backend, *arguments, **settings)

    monkeypatch.setattr(GdsBackend, "__init__", noted)
    with pytest.raises(ConfigError) if fails else contextlib.nullcontext(), stack(slabs(tmp_path)):
        pass
    assert collected == [False] and gc.isenabled()


def test_slabs_without_an_arena_serve_after_a_restart(stack, tmp_path):
    with stack(slabs(tmp_path)) as serving:
        assert stored(serving, PATHS) == [0] * 40
        assert stored(serving, PATHS) == [CHUNKS] * 40
    with stack(slabs(tmp_path)) as serving:
        assert stored(serving, PATHS) == [CHUNKS] * 40


def test_frames_of_a_slab_stack_are_found_below_memory(stack, tmp_path):
    with stack(slabs(tmp_path)) as serving:
        stored(serving, PATHS)
    with stack(CPU, slabs(tmp_path)) as serving:
        assert stored(serving, PATHS) == [CHUNKS] * 40


def test_slabs_that_are_full_take_newcomers_for_the_least_recent(stack, tmp_path):
    with stack(CPU, slabs(tmp_path, frames=CHUNKS * 10)) as serving:
        stored(serving, PATHS)
        assert sum(stored(serving, PATHS[-8:])) == CHUNKS * 8
        assert not serving.seen & {"io_error", "breaker_open", "corrupt", "missing"}


def test_what_lies_beside_the_chunks_does_not_take_their_room(stack, tmp_path):
    """The state of the policy and the log are frames of other lengths, written at any time; their room is reserved."""
    names = "[" + ", ".join(str(tmp_path / name) for name in "abc") + "]"
    log_nbytes = 12 * 2 * FRAME_ALIGNMENT  # as many frames of the least length as a 64th has room for
    capacity = 400 * FRAME + frame_nbytes(len(GittinsConfig().open().save())) + log_nbytes
    paths = [make_keys(CHUNKS * 150)[i : i + CHUNKS] for i in range(0, CHUNKS * 150, CHUNKS)]
    tier = f"{{type: gds, paths: {names}, capacity: {capacity}B, eviction: gittins, mode: bounce}}"
    with stack(CPU, tier) as serving:
        stored(serving, paths)
        _, slabs = serving.manager.usage()
        assert slabs.chunks == 400 and "evicted" in serving.seen
        assert not serving.seen & {"io_error", "breaker_open"}
        stored(serving, paths)
        assert serving.manager.usage()[1].chunks == 400
    with stack(CPU, tier) as serving:
        assert serving.manager.usage()[1].chunks == 400 and not serving.seen


@pytest.mark.more
def test_slabs_above_a_bucket(stack, tmp_path, s3_server):  # noqa: F811
    bucket = f"{{type: s3, bucket: {BUCKET}, prefix: slabs, endpoint: '{s3_server.url}'}}"
    with stack(CPU, slabs(tmp_path), bucket) as serving:
        stored(serving, PATHS[:4])
    for name in "ab":
        shutil.rmtree(tmp_path / name)
    with stack(CPU, slabs(tmp_path), bucket) as serving:
        assert stored(serving, PATHS[:4]) == [CHUNKS] * 4
    with stack(CPU, slabs(tmp_path)) as serving:
        assert stored(serving, PATHS[:4]) == [CHUNKS] * 4, "what came up from the bucket was written to the slabs"


@pytest.fixture
def direct(tmp_path):
    """Opens a stack whose slabs have these settings: returns the tiers that workers read, and what it says of slabs."""

    def opened(settings, layout=LAYOUT, runtime=None):
        file = tmp_path / "kvtier.yaml"
        file.write_text(f"version: 1\ntiers:\n  - {CPU}\n  - {slabs(tmp_path, more=settings)}\n")
        config = load_config(file, Registry.discover())
        with contextlib.closing(open_stack(config, make_context(layout=layout), runtime or Runtime())) as manager:
            return list(manager.reader_handles), manager.describe()[1]

    return opened


@pytest.mark.parametrize("mode", ["gds", "auto", "bounce"])
@pytest.mark.parametrize("recomputes", [True, False])
def test_workers_read_the_slabs_where_a_failed_load_is_a_miss(direct, mode, recomputes):
    tiers, said = direct(f"mode: {mode}", runtime=Runtime(recomputes=recomputes))
    assert tiers == ["gds"] * (mode != "bounce" and recomputes)
    told = "if they can" if recomputes else "no, the engine fails requests whose load fails"
    assert (f"workers read it: {told}" in said) == (mode != "bounce")


def test_workers_read_no_frames_that_they_cannot_verify(direct, monkeypatch):
    """They have no key and no codec, and know of one frame a chunk."""
    monkeypatch.setenv("SLAB_KEY", "a secret that is long enough for a key")
    sealed = direct('mode: gds, seal_key: "env:SLAB_KEY"')
    window = make_group((512,), kind=KVKind.SLIDING_WINDOW, reach=16)
    in_parts = direct("mode: gds", layout=ChunkLayout([make_group((512,)), window], LAYOUT.tokens))
    assert (sealed[0], in_parts[0]) == ([], [])
    assert "no, they are encoded or have a keyed seal" in sealed[1]
    assert "no, the model's chunks have several parts" in in_parts[1]


def test_encoded_frames_are_read_by_readers_that_unpack_them(direct, monkeypatch):
    packed = attrs.evolve(make_layout((64 << 10,), blocks=1), packed=True)
    assert direct("mode: gds", layout=packed)[0] == ["gds"]
    monkeypatch.setattr(GdsConfig, "reads_packed", False)
    tiers, said = direct("mode: gds", layout=packed)
    assert tiers == []
    assert "no, its reader cannot unpack the frames of an arena that packs" in said


def test_frames_of_any_ranks_pass_through_an_arena(direct):
    """Unless all ranks have the same: then there is nothing to rearrange."""
    assert direct("mode: gds", layout=attrs.evolve(LAYOUT, any_ranks=True))[0] == ["gds"]
    tiers, said = direct("mode: gds", layout=by_head(1))
    assert tiers == []
    assert "no, frames from other numbers of ranks are rearranged in slots" in said


def test_frames_that_workers_refuse_pass_through_an_arena(stack, tmp_path):
    """Also for requests that hold it where it lies, waiting for the self-test to end."""
    with stack(CPU, slabs(tmp_path)) as serving:
        stored(serving, PATHS)
    with stack(CPU, slabs(tmp_path, more="mode: auto")) as serving:
        held = serving.manager.lookup(PATHS[0], "early").slots
        assert len(held) == CHUNKS and all(isinstance(place, StoredFrame) for place in held)
        serving.manager.stop_direct_reads("gds", "rank 0: no GPU")
        assert serving.manager.reader_handles == {}
        assert not serving.manager.lookup(PATHS[0], "early").slots, "what is held is still to be read by workers"
        serving.manager.release("early")
        assert stored(serving, PATHS) == [CHUNKS] * 40
        assert "workers read it: no, rank 0: no GPU" in serving.manager.describe()[1]


def complaint(tmp_path, tiers):
    file = tmp_path / "kvtier.yaml"
    file.write_text("version: 1\ntiers:\n" + "".join(f"  - {tier}\n" for tier in tiers))
    with pytest.raises(ConfigError) as error:
        load_config(file, Registry.discover())
    return str(error.value)


def test_the_first_tier_must_be_an_arena(tmp_path):
    assert "the first tier must be an arena, but 'gds' is not" in complaint(tmp_path, [slabs(tmp_path), CPU])


def test_staging_that_holds_no_chunk_is_reported_where_it_was_written(stack, tmp_path):
    with pytest.raises(
        ConfigError, match=r"kvtier.yaml:4: \$.tiers\[0\].staging.capacity: 4KiB is smaller than one chunk"
    ):
        stack(slabs(tmp_path, staging=4096))
    assert "$.tiers[0].staging: 'staging' must be > 0" in complaint(tmp_path, [slabs(tmp_path, staging=0)])


def test_the_command_shows_the_arena_that_was_not_written(tmp_path, capsys):
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"version: 1\ntiers:\n  - {slabs(tmp_path, staging=FRAME)}\n")
    assert main(["check", str(file)]) == 0
    shown = {tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()}
    assert {("$.tiers[0].type", "gds"), ("$.tiers[0].staging.type", "cpu")} <= shown
