"""What engines share through a server, what each has alone, and what becomes of that when one of two hangs or ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from engine_process import LAYOUT, NAMESPACE, OWN, STEPS, filled
from patience import HANG, wait_until
from served import FRAME, PATIENT, serving
from servers.stopping import stop
from test_kills import at_rest, engine, server

from kvtier_core.config import later
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.interfaces import Medium
from kvtier_core.stack.outcomes import LoadLimit, Terms, TooSmall
from kvtier_core.types import EventKind, Nbytes, Slot
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.connection import Connection
from kvtier_remote.memory import served_tier
from kvtier_remote.protocol import Opening
from kvtier_serve.server import Server
from kvtier_testing.samples import make_keys, make_layout

OTHERS = make_keys(14)[6:]


def store(stack, keys, holder="store"):
    """Store chunks without filling them."""
    slots = stack.reserve(keys, holder)
    stack.commit(holder)
    return slots


def steps_until(stack, true):
    """Step as an engine does, until a condition holds."""

    def stepped():
        stack.step()
        return true()

    wait_until(stepped)


def test_what_is_promised_is_pinned_until_its_holder_is_released_or_its_engine_has_ended(tmp_path):
    with serving(tmp_path) as served:
        first, second = served.stack(), served.stack()
        for stack, keys in ((first, OWN[:3]), (second, OWN[3:])):
            stack.reserve(keys, "store", promised_to="another engine")
            stack.commit("store")
            assert stack.pins_by_holder() == {"another engine": 3}
        first.release("another engine")
        assert not first.pins_by_holder()
        first.close()
        second.close()
        wait_until(lambda: at_rest(served.server))


def test_engines_of_one_namespace_find_what_each_stored(tmp_path):
    with serving(tmp_path) as served:
        first, second = served.stack(), served.stack()
        slots = store(first, OWN)
        assert list(second.lookup(OWN, "request").slots) == list(slots.values())
        assert second.pins_by_holder() == {"request": len(OWN)} and not first.pins_by_holder()


def test_holders_of_two_engines_may_have_the_same_name(tmp_path):
    with serving(tmp_path) as served:
        first, second = served.stack(), served.stack()
        store(first, OWN)
        first.lookup(OWN, "request")
        second.lookup(OWN, "request")
        first.release("request")
        assert second.pins_by_holder() == {"request": len(OWN)}


def test_engines_of_two_namespaces_share_nothing_but_the_memory(tmp_path):
    with serving(tmp_path) as served:
        first, second = served.stack("a"), served.stack("b")
        taken = set(store(first, OWN).values())
        assert not second.lookup(OWN, "request").slots
        assert taken.isdisjoint(store(second, OWN).values())


def test_every_engine_hears_what_happens_to_its_tiers(tmp_path):
    with serving(tmp_path) as served:
        first, second = served.stack(), served.stack()
        store(first, OWN)
        events = []
        wait_until(lambda: events.extend(second.step()) or events)
        assert [event.kind for event in events] == [EventKind.STORED] and events[0].keys == tuple(OWN)
        steps_until(second, lambda: second.usage())
        assert second.usage()[0].chunks == len(OWN)


def test_an_engine_knows_what_each_tier_stores_on(tmp_path):
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free": "0B"}
    with serving(tmp_path, 8, disk) as served:
        assert served.stack().media == {"cpu": Medium.HOST, "disk": Medium.DISK}
        assert list(served.stack("another").media) == ["cpu"], "the folder is of the first namespace"


def test_a_chunk_is_found_once_it_was_promoted(tmp_path):
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free": "0B"}
    with serving(tmp_path, 8, disk) as served:
        stack = served.stack()
        store(stack, OWN)
        stack.drain(HANG)
        store(stack, OTHERS)  # evicts the others from the arena
        stack.drain(HANG)
        found = stack.lookup(OWN, "request", Terms(LoadLimit(100.0, 100.0)))
        assert found.pending and stack.still_pending("request") and stack.jobs
        steps_until(stack, lambda: not stack.still_pending("request"))
        assert len(stack.lookup(OWN, "request").slots) == len(OWN)


def test_no_chunk_is_awaited_that_does_not_fit_in_the_memory_of_the_server(tmp_path):
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free": "0B"}
    with serving(tmp_path, 8, disk) as served:
        stack = served.stack()
        for keys in (OTHERS, OWN):
            store(stack, keys)
            stack.drain(HANG)
        found = stack.lookup([*OWN, *OTHERS], "request")
        assert (found.chunks + found.pending, found.rest) == (8, TooSmall("cpu", len(OWN)))
        steps_until(stack, lambda: not stack.still_pending("request"))
        found = stack.lookup([*OWN, *OTHERS], "request")
        assert (found.chunks, found.pending) == (8, 0)
        assert found.miss_reason == f"cpu is too small for {len(OWN)} more of this prompt's chunks"


def test_an_engine_alone_begins_an_epoch_in_place(tmp_path):
    with serving(tmp_path) as served:
        stack = served.stack()
        store(stack, OWN)
        attachment = stack.attachment
        stack.invalidate_all(NAMESPACE.renewed())
        assert not stack.lookup(OWN, "request").slots and not stack.reserve(OWN, "store")
        steps_until(stack, lambda: stack.reserve(OWN, "store"))
        assert stack.attachment == attachment


def test_an_engine_beside_others_moves_and_keeps_what_it_is_loading(tmp_path):
    with serving(tmp_path, slots=64) as served:
        stays, moves = served.stack(), served.stack()
        store(stays, OWN)
        pinned = moves.lookup(OWN, "request").slots
        late = moves.reserve(OTHERS[:2], "late")
        attachment = moves.attachment
        moves.invalidate_all(NAMESPACE.renewed())
        steps_until(moves, lambda: moves.attachment != attachment)
        (old, new) = sorted(served.server.spaces, key=lambda space: len(space.sessions), reverse=True)
        assert old.stack.pins_by_holder() == {f"{2}/request": len(OWN)} and pinned and late
        store(moves, OWN[:4])
        moves.commit("late")
        moves.release("request")
        moves.drain(HANG)
        assert not old.stack.pins_by_holder() and not old.stack.arenas[0].reserved
        assert len(stays.lookup(OWN, "request").slots) == len(OWN), "others lost what they had"
        assert not stays.lookup(OTHERS[:2], "request").slots, "KV of before was kept"
        assert new.stack.usage()[0].chunks == 4


def test_a_dead_epoch_leaves_no_stack_behind(tmp_path):
    with serving(tmp_path) as served:
        stack = served.stack()
        stack.invalidate_all(NAMESPACE.renewed())
        stack.drain(HANG)
        assert len(list(served.server.spaces)) == 1
        stack.close()
        wait_until(lambda: not list(served.server.spaces))


def test_the_longest_unused_stacks_are_closed(tmp_path):
    with serving(tmp_path, slots=64) as served:
        for number in range(12):
            served.stack(f"model {number}").close()
        wait_until(lambda: len(list(served.server.spaces)) == 8)
        assert next(iter(served.server.spaces)).model == "model 4"


def test_the_slots_of_a_hung_worker_are_kept_until_it_has_ended(tmp_path):
    filling = [step.__name__ for step in STEPS].index("fills_the_rest")
    with serving(tmp_path, slots=8) as served, engine(served.path, filling) as hung:
        stop(hung.pid)
        (session,) = served.server.sessions.values()
        arena = session.space.stack.arenas[0]
        other = served.stack()
        reserved = other.reserve(OTHERS, "store")
        assert arena.reserved == len(OWN) + len(reserved) and len(reserved) == 2
        limit = LoadLimit(100.0, 100.0)
        assert other.lookup(OWN, "request", Terms(limit)).pending, "it may be filled soon"
        wait_until(lambda: not other.lookup(OWN, "request", Terms(limit)).pending), "everybody waits for who hangs"
        hung.kill()
        wait_until(lambda: arena.reserved == len(reserved))


def test_a_dead_scheduler_side_frees_nothing_that_its_worker_may_touch(tmp_path):
    with serving(tmp_path, slots=8) as served:
        stack = served.stack()
        handle = next(iter(stack.handles.values()))
        worker = served_tier(handle).config.attach(handle, filled().kv_cache())
        stack.reserve(OWN, "store")
        (space,) = served.server.spaces
        stack.close()
        wait_until(lambda: served.server.ask(lambda: [each.hung_up for each in space.sessions]).result() == [True])
        assert served.server.sessions and space.stack.arenas[0].reserved == len(OWN)
        worker.close()
        wait_until(lambda: at_rest(served.server))


def test_an_engine_maps_all_pages_soon_after_it_has_attached(tmp_path):
    with serving(tmp_path, slots=2000) as served:
        handle = next(iter(served.stack().handles.values()))
        mover = served_tier(handle).config.attach(handle, filled().kv_cache())
        whole = 2000 * LAYOUT.frame_nbytes >> 10

        def mapped():
            """KiB of each mapping of a memfd in this process: the server's and the worker's."""
            found, kind = [], ""
            for line in Path("/proc/self/smaps").read_text().splitlines():
                kind = line if "-" in line.split()[0] else kind
                if line.startswith("Rss:") and "memfd:kvtier" in kind:
                    found.append(int(line.split()[1]))
            return found

        wait_until(lambda: sum(size >= whole for size in mapped()) >= 2), mapped()
        mover.close()


@contextlib.contextmanager
def busy(server):
    """The server's thread does something else meanwhile."""
    begun, ends = threading.Event(), threading.Event()
    server.ask(lambda: (begun.set(), ends.wait(HANG)))
    begun.wait(HANG)
    try:
        yield
    finally:
        ends.set()


def test_a_late_answer_is_the_next_lookups(tmp_path):
    with serving(tmp_path) as served:
        stack = served.stack(waits=Waits())
        store(stack, OWN)
        stack.drain(HANG)
        with busy(served.server):
            assert stack.lookup(OWN, "request").pending
        steps_until(stack, lambda: not stack.still_pending("request"))
        with busy(served.server):
            assert len(stack.lookup(OWN, "request").slots) == len(OWN)


def test_a_server_that_stops_answering_costs_one_wait_and_is_used_when_it_answers(tmp_path, monkeypatch):
    path = tmp_path / "kvtier.sock"
    with server(tmp_path, path) as stopped:
        stack = RemoteStack(path, Opening("model", "engine", NAMESPACE, LAYOUT))
        store(stack, OWN)
        stack.drain(HANG)
        stop(stopped.pid)
        first = stack.lookup(OWN, "request")
        assert first.pending == len(OWN) and stack.still_pending("request")
        assert not stack.reserve(OWN + OTHERS, "store"), "it waits a little longer, and once as well"
        waits, events = [], []
        monkeypatch.setattr(Connection, "wait", lambda connection, seconds: waits.append(seconds))
        for number in range(20):
            assert stack.lookup(OWN, f"request {number}").pending
            assert not stack.reserve(OWN + OTHERS, f"store {number}")
            events += stack.step()
        assert not waits, "they waited, too"
        unstored = [each for each in events if each.why == "the server did not answer in time"]
        assert [(each.kind, each.keys) for each in unstored] == [(EventKind.REJECTED, tuple(OTHERS))] * 21, (
            "what is stored already is not lost"
        )
        monkeypatch.undo()
        wait_until(lambda: "does not answer" in stack.lookup(OWN, "another").miss_reason)
        stopped.send_signal(signal.SIGCONT)
        steps_until(stack, lambda: not stack.still_pending("request"))
        assert len(stack.lookup(OWN, "request").slots) == len(OWN), "the late answer was lost"
        stack.close()


def test_an_engine_goes_on_without_its_server_and_reaches_the_next_one(tmp_path):
    path = tmp_path / "kvtier.sock"
    with server(tmp_path, path) as first:
        stack = RemoteStack(path, Opening("model", "engine", NAMESPACE, LAYOUT), PATIENT)
        store(stack, OWN)
        attachment = stack.attachment
        first.kill()
        first.wait()
        wait_until(lambda: str(path) in stack.lookup(OWN, "request").miss_reason)
        assert stack.step() == [] and not stack.reserve(OWN, "store") and stack.usage() == []
        assert list(stack.handles) == list(stack.media) == ["cpu"], "what a load came from has no name any more"
    with server(tmp_path, path):
        steps_until(stack, lambda: stack.attachment == attachment + 1)
        assert not stack.lookup(OWN, "request").slots, "its memory is another one"
        assert isinstance(next(iter(store(stack, OWN).values())), Slot)
        stack.close()


def test_an_engine_starts_without_its_server(tmp_path):
    stack = RemoteStack(tmp_path / "none.sock", Opening("model", "engine", NAMESPACE, LAYOUT))
    assert "No such file" in stack.lookup(OWN, "request").miss_reason
    assert stack.describe() and not stack.media
    stack.close()


def test_a_chunk_that_cannot_be_held_is_refused_in_words(tmp_path):
    with serving(tmp_path, slots=2) as served:
        stack = served.stack("large", make_layout((1 << 20, 1 << 20), 4))
        assert "is smaller than one chunk" in stack.lookup(OWN, "request").miss_reason


def test_a_server_ends_its_sessions_when_engines_close(tmp_path):
    with serving(tmp_path) as served:
        stack = served.stack()
        stack.reserve(OWN, "store")
        stack.close()
        wait_until(lambda: at_rest(served.server))


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to be somebody else")
def test_other_users_are_refused_on_both_sides(tmp_path):
    path = Path(tempfile.gettempdir()) / f"kvtier-{os.getpid()}.sock"  # where another user may look
    code = f"""
import os, socket
from kvtier_remote.connection import connect
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect("{path}")
    print(stranger.recv(1))
connect("{path}")
"""
    with serving(tmp_path) as served:
        served.path.chmod(0o777)
        served.path.rename(path)
        try:
            other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
        finally:
            path.rename(served.path)
    assert other.stdout == "b''\n", "the server spoke to a stranger"
    assert "of user 0 answers there" in other.stderr


def test_memory_that_no_other_process_can_map_is_refused(tmp_path):
    heap = {"version": 1, "tiers": [{"type": "heap", "capacity": "1MiB"}]}
    with pytest.raises(ConfigError, match="cannot be shared with other processes"):
        Server(load_config(heap, Registry.of()), tmp_path / "kvtier.sock")


def test_the_usage_of_a_shared_store_is_what_all_its_users_have_there(tmp_path):
    folder = tmp_path / "shared"
    disk = {"type": "disk", "path": str(folder), "capacity": str(Nbytes(20 * FRAME)), "min_free": "0B", "shared": True}
    with serving(tmp_path, 16, disk) as first:
        one, other = first.stack("one"), first.stack("other")
        keys = make_keys(60)
        for number in range(0, 60, 10):
            stack = (one, other)[number // 10 % 2]
            store(stack, keys[number : number + 10], f"store {number}")
            stack.drain(HANG)
        there = [file.stat().st_size for file in folder.rglob("*.kv")]
        assert 10 < len(there) <= 20
        (tier,) = list(first.server.spaces)[1].stack.tiers  # whose engine was the last to write
        usage = first.server.ask(tier.usage).result()
        assert (usage.chunks, usage.nbytes, usage.capacity) == (len(there), sum(there), 20 * FRAME)


def test_the_next_server_takes_a_folder_over(tmp_path, monkeypatch):
    """A tier that is not required opens once the former server, which has its folder, has ended."""
    monkeypatch.setattr(later, "_EVERY", 0.05)
    disk = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "16MiB", "min_free": "0B", "required": False}
    keys = make_keys(6)
    (tmp_path / "next").mkdir()
    with serving(tmp_path, 16, disk) as former:
        stack = former.stack()
        store(stack, keys)
        stack.drain(HANG)
        with serving(tmp_path / "next", 16, disk) as served:
            stack = served.stack()
            assert not stack.lookup(keys, "before").slots
            stack.release("before")
            (space,) = served.server.spaces
            assert [usage.tier for usage in served.server.ask(space.stack.usage).result()] == ["cpu"]
            former.close()
            wait_until(lambda: len(served.server.ask(space.stack.usage).result()) == 2)
            stack.on_request(keys)
            steps_until(stack, lambda: len(stack.lookup(keys, "after").slots) == 6)
