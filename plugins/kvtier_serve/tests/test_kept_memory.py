"""Memory that outlives its server: the next one adopts what is whole; what others may still touch does not change."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from books import used
from engine_process import BLOCKS, LAYOUT, NAMESPACE, OWN, STEPS, filled
from patience import HANG, assert_never, wait_until
from served import PATIENT, config_of, serving
from servers.stopping import stop
from sizes import every_third
from test_kills import at_rest, engine, erase, server
from test_shared_stack import OTHERS, steps_until

from kvtier_core.config.open import open_stack
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.interfaces import OpenContext
from kvtier_core.stack.outcomes import Terms
from kvtier_core.storekit.folder import file_system_of
from kvtier_core.types import FRAME_MAGIC
from kvtier_remote import user_locks
from kvtier_remote.client import RemoteStack
from kvtier_remote.memory import served_tier
from kvtier_remote.protocol import Opening
from kvtier_serve.kept import journal
from kvtier_serve.server import Server
from kvtier_serve.tenants import Quota
from kvtier_testing.samples import make_keys, make_layout

PAGES = [[list(range(BLOCKS))]]
SLOTS = 16
MANY = make_keys(40)[len(OWN) :]
CAPACITY = f"{SLOTS * LAYOUT.frame_nbytes}B"


@pytest.fixture
def keep():
    """A folder in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvtier-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def attached():
    """An engine of a server, given its path."""
    with contextlib.ExitStack() as closing:

        def attached(path, namespace=NAMESPACE):
            engine = Engine(path, namespace)
            closing.callback(engine.close)
            return engine

        yield attached


class Engine:
    """Stores and loads through a server, and compares all bytes."""

    def __init__(self, path, namespace):
        self.stack = RemoteStack(path, Opening("model", "an engine", namespace, LAYOUT), PATIENT)
        self.buffer = filled()
        self.attach()

    def attach(self):
        handle = next(iter(self.stack.handles.values()))
        self.mover = served_tier(handle).config.attach(handle, self.buffer.kv_cache())

    def store(self, keys, salt=b""):
        self.stack.on_request(keys, salt=salt)
        slots = self.stack.reserve(keys, "store", salt)
        self.mover.store(1, PAGES * len(slots), [slot.index for slot in slots.values()])
        self.mover.wait([1])
        self.mover.finished()
        self.stack.commit("store")
        self.stack.drain(HANG)
        return slots

    def load(self, keys, salt=b""):
        """How many chunks are found; all have the bytes that were stored."""
        found = self.stack.lookup(keys, "request", Terms(salt=salt)).slots
        for slot in found:
            erase(self.buffer)
            self.mover.load(2, [slot.index], PAGES)
            self.mover.wait([2])
            assert [each.ok for each in self.mover.finished()] == [True]
            assert self.buffer.everything() == filled().everything(), "other bytes than those that were stored"
        self.stack.release("request")
        return len(found)

    def close(self):
        self.mover.close()
        self.stack.close()


def adopted(served):
    """Wait until a server is done with what a former one left."""
    wait_until(lambda: not served.server.ask(lambda: served.server.spaces.adopts).result())


def test_the_next_server_adopts_the_chunks_of_the_last(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        stored = before.store(OWN)
        before.close()
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path)
        assert after.load(OWN) == len(OWN)
        assert list(after.stack.lookup(OWN, "request").slots) == list(stored.values())
        assert len(after.store(OTHERS)) == len(OTHERS)
        after.close()
        wait_until(lambda: at_rest(second.server))


@pytest.mark.parametrize("steps", every_third(range(1, len(STEPS))), ids=[step.__name__ for step in STEPS[1:]])
def test_a_server_killed_before_any_step_leaves_what_is_whole(steps, tmp_path, keep, attached):
    path = tmp_path / "kvtier.sock"
    stored = STEPS.index(next(step for step in STEPS if step.__name__ == "commits"))
    renewed = STEPS.index(next(step for step in STEPS if step.__name__ == "begins_an_epoch"))
    with server(tmp_path, path, keep=keep, capacity=CAPACITY) as killed, engine(path, steps):
        whole = stored < steps <= renewed
        if whole:
            wait_until(lambda: (keep / "memory").read_bytes().count(FRAME_MAGIC) == len(OWN))
        killed.kill()
        killed.wait()
        with serving(tmp_path, SLOTS, keep=keep) as second:
            after = attached(second.path)
            after.load(OWN)
            after.store(OTHERS)
            after.load(OTHERS)
        # The engine of before has the memory mapped for as long as it lives, and has been told nothing.
    with serving(tmp_path, SLOTS, keep=keep) as third:
        adopted(third)
        after = attached(third.path)
        # Whether it had heard of the epoch when it was killed is not known.
        assert after.load(OWN) in ([len(OWN)] if whole else [0] if steps <= stored else [0, len(OWN)])
        after.store(OWN)
        assert after.load(OWN) == len(OWN)
        after.close()
        wait_until(lambda: at_rest(third.server))


def test_memory_of_another_folder_than_the_locked_one_is_not_used(keep, tmp_path):
    """Whoever may write to the folder above can swap two folders of this user between two steps of a start."""
    (tmp_path / "memory").touch()
    locked = journal.Journal(keep, b"")
    with pytest.raises(BackendError, match=f"{keep}: not the folder that was locked"):
        locked.begin((tmp_path / "memory").stat().st_ino)
    locked.close()


def test_slots_of_a_hung_worker_stay_as_they_are_until_it_has_ended(tmp_path, keep, attached):
    path = tmp_path / "kvtier.sock"
    half = [step.__name__ for step in STEPS].index("fills_the_rest")
    with server(tmp_path, path, keep=keep, capacity=CAPACITY) as killed, engine(path, half) as hung:
        stop(hung.pid)
        killed.kill()
        killed.wait()
        with serving(tmp_path, SLOTS, keep=keep) as second:
            after = attached(second.path)

            assert len(after.store(MANY)) == SLOTS - len(OWN), "a slot was lent twice"
            assert not after.store(OWN), "a chunk has two slots"
            hung.kill()
            adopted(second)
            assert len(after.store(OWN)) == len(OWN)
            after.close()


def test_adopted_chunks_stay_while_earlier_processes_may_read_them(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        before.store(OWN)
    file = before.mover._file
    user_locks.lock(file.fileno(), 4711)  # a worker that has not noticed yet
    with serving(tmp_path, SLOTS, keep=keep) as second:
        after = attached(second.path)
        wait_until(lambda: after.load(OWN) == len(OWN))
        assert len(after.store(MANY)) == SLOTS - len(OWN), "what may be read was overwritten"
        assert second.server.ask(lambda: second.server.spaces.adopts).result()
        after.close()


def test_an_idle_engine_keeps_nothing_from_the_next_server(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        idle = attached(first.path)
        idle.store(OWN)
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        with pytest.raises(BackendError, match="the server is gone"):
            idle.mover.load(3, [0], PAGES)
        steps_until(idle.stack, lambda: idle.stack.attachment == 2)
        idle.mover.close()
        idle.attach()
        assert idle.load(OWN) == len(OWN)
        idle.close()
        assert second.server.spaces is not None


def test_a_copy_under_way_ends_before_the_next_server_may_have_its_slot(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        busy = attached(first.path)
        busy.store(OWN)
        busy.mover.load(7, [busy.stack.lookup(OWN, "request").slots[0].index], PAGES)
    with serving(tmp_path, SLOTS, keep=keep) as second:
        spaces = second.server.spaces
        assert_never(lambda: not second.server.ask(lambda: spaces.adopts).result())
        busy.mover.wait([7])
        assert [each.ok for each in busy.mover.finished()] == [True]
        adopted(second)
        busy.close()


def harm(keep, harmed):
    """Change the memory of a server that has ended."""
    with open(keep / "memory", "r+b") as memory:
        harmed(memory)


def flip(slot, offset):
    def harmed(memory):
        memory.seek(slot * LAYOUT.frame_nbytes + offset)
        byte = memory.read(1)[0]
        memory.seek(-1, os.SEEK_CUR)
        memory.write(bytes([byte ^ 1]))

    return harmed


@pytest.mark.parametrize("offset", [0, 20, 100, 4096, LAYOUT.frame_nbytes - 1])
def test_a_slot_that_was_changed_is_not_adopted(offset, tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        slots = before.store(OWN)
        before.close()
    harm(keep, flip(slots[OWN[3]].index, offset))
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path)
        assert after.load(OWN) == 3
        after.store(OWN)
        assert after.load(OWN) == len(OWN)
        after.close()


def test_slots_that_changed_places_are_not_adopted(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        slots = before.store(OWN)
        before.close()

    def swap(memory):
        nbytes = LAYOUT.frame_nbytes
        one, two = slots[OWN[0]].index * nbytes, slots[OWN[1]].index * nbytes
        contents = [(memory.seek(at), memory.read(nbytes))[1] for at in (one, two)]
        for at, content in zip((two, one), contents, strict=True):
            memory.seek(at)
            memory.write(content)

    harm(keep, swap)
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path)
        assert not after.load(OWN)
        after.close()


def test_invalidated_chunks_are_not_adopted(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        before.store(OWN)
        before.stack.lookup(OWN, "request")  # pinned, so that their slots stay in use
        (space,) = first.server.spaces
        first.server.ask(lambda: space.stack.arenas[0].drop(OWN[:2])).result()
    before.mover.close()
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path)
        (space,) = second.server.spaces
        assert len(space.stack.arenas[0].index) == len(OWN) - 2 and not after.load(OWN)
        after.close()


def test_an_epoch_is_adopted_as_one(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        before.store(OWN)
        renewed = NAMESPACE.renewed()
        before.stack.invalidate_all(renewed)
        steps_until(before.stack, lambda: before.stack.reserve(OTHERS[:1], "probe"))
        before.stack.release("probe")
        before.store(OTHERS)
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path, namespace=renewed)
        assert after.load(OTHERS) == len(OTHERS) and not after.load(OWN)
        assert not attached(second.path).load(OWN), "KV of before the epoch came back"


def test_an_abandoned_stack_is_closed_when_no_process_may_touch_its_slots(tmp_path, keep, attached, monkeypatch):
    monkeypatch.setattr("kvtier_serve.spaces._COME_BACK", 0.0)
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path, namespace=NAMESPACE.renewed())
        before.store(OWN)
        user = user_locks.lock(before.mover._file.fileno(), 4711)
    with serving(tmp_path, SLOTS, keep=keep) as second:
        after = attached(second.path)
        assert len(after.store(MANY)) <= SLOTS - len(OWN), "somebody may still read the others"
        os.close(user)
        wait_until(lambda: len(list(second.server.spaces)) == 1)
        assert after.load(MANY) + len(after.store(MANY)) > SLOTS - len(OWN)


def test_two_models_keep_their_parts(tmp_path, keep, attached):
    wide = make_layout((3072, 5120), 8)
    with serving(tmp_path, 64, keep=keep) as first:
        one = attached(first.path)
        one.store(OWN)
        two = first.stack("another", wide)
        two.reserve(OTHERS, "store")
        two.commit("store")
        two.drain(HANG)
        one.close()
    with serving(tmp_path, 64, keep=keep) as second:
        adopted(second)
        one = attached(second.path)
        assert one.load(OWN) == len(OWN)
        assert len(second.stack("another", wide).lookup(OTHERS, "request").slots) == len(OTHERS)
        one.close()


def test_usage_and_quotas_of_tenants_are_kept(tmp_path, keep, attached):
    quota = Quota(soft=4 * LAYOUT.frame_nbytes)
    with serving(tmp_path, SLOTS, keep=keep, quota=quota) as first:
        before = attached(first.path)
        before.store(OWN[:4], b"salt")
        before.close()
        name = first.server.spaces.tenants.name(b"salt")
    with serving(tmp_path, SLOTS, keep=keep, quota=quota) as second:
        adopted(second)
        tenants = second.server.spaces.tenants
        assert tenants.name(b"salt") == name and used(tenants)[name] == 4 * LAYOUT.frame_nbytes


def test_memory_of_another_capacity_begins_empty(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        before.store(OWN)
    with serving(tmp_path, 2 * SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path)
        assert not after.load(OWN)
        assert len(after.store(MANY)) == 2 * SLOTS, "former users keep memory that is another file"
        after.close()
    before.close()


def cut(nbytes):
    return lambda content: content[:-nbytes]


def damaged(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "change", [damaged, lambda content: b"", lambda content: b"another release\n" + content], ids=["flip", "empty", "x"]
)
def test_memory_with_a_worthless_journal_is_used_when_no_earlier_process_has_it(change, tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        before.store(OWN)
    user = user_locks.lock(before.mover._file.fileno(), 4711)
    (keep / "journal").write_bytes(change((keep / "journal").read_bytes()))
    with serving(tmp_path, SLOTS, keep=keep) as second:
        assert not second.stack().reserve(OWN, "store"), "somebody may still write there"
    with serving(tmp_path, SLOTS, keep=keep) as second:
        after = second.stack()
        assert not after.reserve(OWN, "store"), "the journal of the second server says that all is free"
        os.close(user)
        adopted(second)
        steps_until(after, lambda: after.reserve(OWN, "store"))


def test_a_journal_that_ends_in_the_middle_of_a_record_is_believed_up_to_that(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        before.store(OWN)
        before.close()
    content = (keep / "journal").read_bytes()
    for nbytes in (1, 5, 11, 13, 20):
        (keep / "journal").write_bytes(content + content[-40:][:nbytes] if nbytes < 12 else content)
        with serving(tmp_path, SLOTS, keep=keep) as second:
            adopted(second)
            after = attached(second.path)
            assert after.load(OWN) == len(OWN)
            after.close()
        content = (keep / "journal").read_bytes()


def test_a_journal_is_rewritten_when_it_has_grown(tmp_path, keep, attached, monkeypatch):
    monkeypatch.setattr(journal, "_LEAST_NBYTES", 10_000)
    drawn = random.Random(0)
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        for _ in range(60):
            before.store(drawn.sample(make_keys(40), 5))
        last = make_keys(45)[40:]
        before.store(last)
        before.close()
        assert (keep / "journal").stat().st_size < 40_000
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path)
        assert after.load(last) == len(last)
        (space,) = second.server.spaces
        assert len(space.stack.arenas[0].index) == SLOTS
        after.close()


def test_a_journal_that_cannot_be_written_is_removed(tmp_path, keep, attached, monkeypatch, caplog):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        monkeypatch.setattr(journal.os, "write", lambda file, message: len(message) // 2)
        before.store(OWN)
        assert before.load(OWN) == len(OWN), "the engine's cache goes on"
        monkeypatch.undo()
        before.close()
        assert not (keep / "journal").exists() and "will not outlive this server" in caplog.text
    with serving(tmp_path, SLOTS, keep=keep) as second:
        adopted(second)
        after = attached(second.path)
        assert not after.load(OWN) and len(after.store(OWN)) == len(OWN)
        after.close()


def test_two_servers_never_have_the_same_memory(tmp_path, keep):
    with serving(tmp_path, SLOTS, keep=keep), pytest.raises(ConfigError, match="keeps its frames here"):
        Server(config_of(SLOTS, keep=keep), tmp_path / "another.sock")


def test_memory_is_kept_on_a_tmpfs_alone(tmp_path):
    if file_system_of(tmp_path) == "tmpfs":
        pytest.skip("the folder for temporary files is in memory")
    with pytest.raises(ConfigError, match="name a folder on a tmpfs"):
        Server(config_of(SLOTS, keep=tmp_path / "keep"), tmp_path / "kvtier.sock")
    assert not (tmp_path / "keep" / "memory").exists()


def test_only_a_server_keeps_memory(keep):
    with pytest.raises(ConfigError, match="only kvtier serve can keep its memory"):
        open_stack(config_of(SLOTS, keep=keep), OpenContext(NAMESPACE, LAYOUT))
    assert not list(keep.iterdir())


def test_an_arena_that_cannot_keep_its_memory_is_refused(keep, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_serve.memories.SupportsKeeping", type("Nothing", (), {}))
    with pytest.raises(ConfigError, match="cannot outlive the server"):
        Server(config_of(SLOTS, keep=keep), tmp_path / "kvtier.sock")


def test_a_journal_with_any_byte_changed_is_not_believed(tmp_path, keep, attached):
    with serving(tmp_path, SLOTS, keep=keep) as first:
        attached(first.path).store(OWN)
    content = (keep / "journal").read_bytes()
    inode = (keep / "memory").stat().st_ino
    for at in range(len(content)):
        (keep / "journal").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        (keep / "journal").chmod(0o1600)  # as the server makes it
        read = journal.Journal(keep, b"")
        assert not read.begin(inode) and not read.spaces, f"byte {at}"
        read.close()
