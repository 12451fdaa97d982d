"""Kept memory and slabs of a server that others may write to while it runs: nothing of it is loaded or stored."""

from __future__ import annotations

import os

import pytest
from engine_process import LAYOUT, OWN
from opened import forge, kubelet_opens, somebody_closes
from patience import HANG
from served import config_of, serving
from test_kept_memory import PAGES, SLOTS, attached, keep  # noqa: F401 - fixtures
from test_shared_stack import OTHERS
from test_slabs_of_a_server import PATIENCE, slabs, worker_of
from test_truncated_memory import attach_again, loads, lost_before_it_is_sealed

from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.stack.outcomes import Terms
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.types import ReadStatus
from kvtier_serve.server import Server


class Stranger:
    """Opens the memory once kubelet has opened it, and forges KV in it, then and later."""

    def __init__(self, folder):
        self.folder = folder
        self.file = -1

    def __call__(self):
        if self.file < 0:
            kubelet_opens(self.folder)
            self.file = os.open(self.folder / "memory", os.O_RDWR)
        os.pwrite(self.file, b"forged" * (SLOTS * LAYOUT.frame_nbytes // 6), 0)


@pytest.fixture
def made(keep):  # noqa: F811
    """A folder that the server makes."""
    return keep / "made"


@pytest.fixture
def stranger(made):
    stranger = Stranger(made)
    yield stranger
    os.close(stranger.file)


def test_memory_that_was_opened_is_lost_and_the_server_begins_anew(tmp_path, made, attached, stranger):  # noqa: F811
    with serving(tmp_path, SLOTS, keep=made) as served:
        own = attached(served.path)
        own.store(OWN)
        before = (made / "memory").stat().st_ino
        stranger()
        with pytest.raises(BackendError, match="the memory of the server was truncated or opened to others"):
            own.mover.load(5, [0], PAGES)
        attach_again(own, 1)
        assert (made / "memory").stat().st_ino != before
        stranger()
        assert not loads(own, OWN)
        own.store(OWN)
        assert loads(own, OWN) == len(OWN)


def test_memory_that_was_seen_open_is_never_trusted_again(tmp_path, made, attached, stranger, monkeypatch):  # noqa: F811
    load = HostMover.load
    with serving(tmp_path, SLOTS, keep=made) as served:
        own = attached(served.path)
        slot = next(iter(own.store(OWN).values())).index

        def opened_first(*arguments):
            stranger()
            assert own.mover._memory.is_broken
            somebody_closes(made)
            load(*arguments)

        monkeypatch.setattr(HostMover, "load", opened_first)
        own.mover.load(2, [slot], PAGES)
        own.mover.wait([2])
        assert [each.ok for each in own.mover.finished()] == [False]


def test_what_was_sealed_in_opened_memory_is_written_nowhere(tmp_path, made, attached, stranger, monkeypatch):  # noqa: F811
    lost_before_it_is_sealed(tmp_path, made, attached, monkeypatch, stranger)


def test_memory_that_was_opened_between_two_servers_is_not_adopted(tmp_path, made, attached, stranger):  # noqa: F811
    with serving(tmp_path, SLOTS, keep=made) as served:
        attached(served.path).store(OWN)
    stranger()
    with serving(tmp_path, SLOTS, keep=made) as served:
        own = attached(served.path)
        assert not loads(own, OWN)
        own.store(OWN)
        assert loads(own, OWN) == len(OWN)


@pytest.mark.parametrize("name", ["journal", "journal.new"])
def test_what_the_server_did_not_make_is_not_removed(tmp_path, made, name):
    with serving(tmp_path, SLOTS, keep=made):
        pass
    (made / name).unlink(missing_ok=True)
    (made / name).write_bytes(b"precious")
    with pytest.raises((ConfigError, BackendError), match="not a file that kvtier made; name another folder"):
        Server(config_of(SLOTS, keep=made), tmp_path / "kvtier.sock")
    assert (made / name).read_bytes() == b"precious"


@pytest.mark.parametrize("forged", ["before it is found", "after it is found"])
def test_engines_load_no_forged_frame_from_slabs_that_were_opened(tmp_path, forged):
    """By direct reads of their workers, and through memory."""
    with serving(tmp_path, 8, slabs(tmp_path)) as served:
        first, second = served.stack(), served.stack(recomputes=False)
        with worker_of(first) as worker:
            worker.store(OWN)
            worker.store(OTHERS)
            frames = first.lookup(OWN, "request", Terms(PATIENCE)).slots
            if forged == "before it is found":
                first.release("request")
            for name in "ab":
                kubelet_opens(tmp_path / name)
            files = [os.open(tmp_path / name / "kvtier.slab", os.O_RDWR) for name in "ab"]
            for frame in frames:
                slab, at = frame.location.place
                forge(files[slab], at, frame.location.nbytes)
            if forged == "before it is found":
                frames = first.lookup(OWN, "request", Terms(PATIENCE)).slots
            for frame in frames:
                assert worker.read(frame)[frame.key].status is ReadStatus.IO_ERROR
            first.release("request")
            second.lookup(OWN, "request", Terms(PATIENCE))
            second.drain(HANG)
            assert not second.lookup(OWN, "request", Terms(PATIENCE)).slots
            for file in files:
                os.close(file)
