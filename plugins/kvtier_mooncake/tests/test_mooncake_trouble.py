"""Masters, clients and owners of memory in trouble: what fails is a BackendError or a miss, and trouble ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import answered, wait_until
from servers.mooncake import ROOM, Master
from servers.stopping import stop
from sizes import some

from kvtier_core.errors import BackendError, StoreFull
from kvtier_testing.samples import make_frame, make_keys, same

ONE, TWO, THREE = KEYS = make_keys(3)
LARGE = 8 << 20
CALLS = {
    "contains": lambda tier: tier.contains(KEYS),
    "read": lambda tier: read(tier, *KEYS),
    "write": lambda tier: write(tier, *KEYS),
    "delete": lambda tier: tier.delete(KEYS),
}
each_call = pytest.mark.parametrize("call", some(CALLS, "read", "write"))


def write(tier, *keys):
    """The result of `Backend.write`."""
    return tier.write(keys, [make_frame(key) for key in keys])


def read(tier, *keys):
    """Of each key `hit`, `miss`, or its error. A hit has the bytes that `write` has written."""
    views = [memoryview(bytearray(len(make_frame(key)))) for key in keys]
    told = {0: "miss", len(views[0]): "hit"}
    found = [told.get(count, count) if isinstance(count, int) else str(count) for count in tier.read(keys, views)]
    assert all(same(view, make_frame(key)) for key, view, each in zip(keys, views, found, strict=True) if each == "hit")
    return found


def works(tier):
    assert write(tier, *KEYS) is None
    assert tier.contains(KEYS) == [True] * 3
    assert read(tier, *KEYS) == ["hit"] * 3


def when_it_works(tier):
    """Clients lend a master that was started again their memory a second later."""

    def does():
        try:
            return write(tier, *KEYS) is None
        except BackendError:
            return False

    wait_until(does, "a tier does not work again")
    answered(lambda: works(tier))


def client_of(parent):
    """The process id of Mooncake's client, which a process has started."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in children.read_text().split():
            if b"kvtier_mooncake.client_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("there is no process of Mooncake's client")


# -- the master ------------------------------------------------------------------------------------


@each_call
def test_a_master_that_was_killed_and_started_again_empty(master, tier, call):
    works(tier)
    master.kill()
    with pytest.raises(BackendError, match=f"{master.address}: "):
        CALLS[call](tier)
    master.start()
    assert not any(tier.contains(KEYS))
    when_it_works(tier)


@each_call
def test_a_master_that_hangs(master, owner, open_tier, call):
    """The call ends while the master still hangs, and the tier works when that is over."""
    tier = open_tier(master, timeout=3)
    answered(lambda: works(tier))
    with master.stopped(), pytest.raises(BackendError, match=f"{master.address}: (no answer in time|.* not answer)"):
        CALLS[call](tier)
    when_it_works(tier)


def test_a_master_that_is_not_there_when_the_tier_opens(master, open_tier):
    """The engine starts all the same, and its log says what was wrong."""
    master.kill()
    tier = open_tier(master)
    assert tier.facts() == {"master": f"{master.address} -> {master.address}: Connection refused"}
    with pytest.raises(BackendError, match="Connection refused"):
        tier.contains(KEYS)
    master.start()
    with master.owner(ROOM):
        works(tier)


def test_a_master_that_hangs_when_the_tier_opens(master, owner, open_tier):
    """Mooncake's client would hold the GIL for a minute and more: here another process's."""
    with master.stopped():
        tier = open_tier(master, timeout=3)
    assert tier.facts() == {"master": f"{master.address} -> {master.address}: no answer in time"}
    when_it_works(tier)


# -- memory of others ------------------------------------------------------------------------------


def test_an_owner_that_was_killed_is_a_miss_for_its_frames_alone(master, open_tier):
    with master.owner(ROOM) as gone, master.owner(ROOM) as stays:
        there = open_tier(master, preferred_segment=gone.name)
        tier = open_tier(master, preferred_segment=stays.name)
        write(there, ONE, THREE)
        write(tier, TWO)
        gone.kill()
        assert tier.contains(KEYS) == [True] * 3, "the master knew at once: then this test shows nothing"
        first, second, third = read(tier, *KEYS)
        assert second == "hit"
        assert "the transfer failed: the client whose segment has the frame is gone or hanging" in first == third
        wait_until(lambda: tier.contains(KEYS) == [False, True, False], "the master never notices")
        assert read(tier, *KEYS) == ["miss", "hit", "miss"]
        when_it_works(tier)


def test_an_owner_that_hangs(master, owner, open_tier):
    tier = open_tier(master, timeout=3)
    answered(lambda: works(tier))
    with owner.stopped():
        try:
            found = read(tier, *KEYS)
        except BackendError as error:
            found = [str(error)]
    assert "hit" not in found
    when_it_works(tier)


def test_a_tier_lends_memory_until_it_closes(master, open_tier):
    lends, uses = open_tier(master, segment=ROOM), open_tier(master)
    works(uses)
    assert read(lends, *KEYS) == ["hit"] * 3
    lends.close()
    assert uses.contains(KEYS) == [False] * 3
    with pytest.raises(StoreFull):
        write(uses, ONE)


# -- no room ---------------------------------------------------------------------------------------


def test_a_store_that_is_full_of_pinned_frames(master, owner, open_tier):
    tier, keys = open_tier(master, hard_pin=True), make_keys(2 * ROOM // LARGE)
    with pytest.raises(StoreFull, match="no room") as failed:
        for key in keys:
            tier.write([key], [make_frame(key, nbytes=LARGE)])
    assert failed.value.missing == LARGE
    assert tier.contains(keys[:2]) == [True] * 2 and not tier.contains(keys[-1:])[0]
    outcomes = tier.write([ONE, TWO, keys[-1]], [make_frame(ONE), make_frame(TWO), make_frame(keys[-1], nbytes=LARGE)])
    assert outcomes[:2] == [None, None] and isinstance(outcomes[2], StoreFull)


def test_a_full_store_evicts_what_was_not_used_lately(tier):
    keys = make_keys(4 * ROOM // LARGE)

    def accepts(key):
        try:
            return tier.write([key], [make_frame(key, nbytes=LARGE)]) is None
        except StoreFull:
            return False

    for key in keys:
        wait_until(lambda key=key: accepts(key), "a store that evicts takes no more")
    assert tier.contains(keys[-1:]) == [True] and not all(tier.contains(keys))


# -- the client ------------------------------------------------------------------------------------


@each_call
def test_a_client_whose_process_ends_is_started_again(tier, call):
    works(tier)
    client = client_of(os.getpid())
    os.kill(client, signal.SIGKILL)
    with contextlib.suppress(BackendError):  # unless its end was noticed before
        CALLS[call](tier)
    works(tier)
    assert client_of(os.getpid()) != client


@pytest.mark.more
def test_a_client_that_hangs(master, owner, open_tier):
    tier = open_tier(master, timeout=1)
    answered(lambda: works(tier))
    client = client_of(os.getpid())
    stop(client)
    for _ in range(9):
        with pytest.raises(BackendError, match="no answer"):
            tier.contains(KEYS)
    os.kill(client, signal.SIGCONT)
    when_it_works(tier)


def test_a_late_answer_is_not_taken_for_the_next(master, owner, open_tier):
    """Nor is the memory used again before, to which a read may still be writing."""
    tier = open_tier(master, timeout=3)
    answered(lambda: write(tier, ONE))
    client = client_of(os.getpid())
    stop(client)
    for late in (lambda: read(tier, ONE), lambda: tier.contains([ONE, ONE])):
        with pytest.raises(BackendError, match="no answer in time"):
            late()
    os.kill(client, signal.SIGCONT)
    assert answered(lambda: tier.contains([TWO])) == [False]
    assert answered(lambda: read(tier, TWO, ONE)) == ["miss", "hit"]


def test_the_client_ends_with_the_engine(master, owner):
    program = f"""
import sys, time
from kvtier_testing.samples import make_context
from kvtier_mooncake.config import MooncakeConfig
tier = MooncakeConfig(master="{master.address}", segment={ROOM}).open(make_context())
print(flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as engine:
        try:
            engine.stdout.readline()
            client = Path(f"/proc/{client_of(engine.pid)}")
        finally:
            engine.kill()
    wait_until(lambda: not client.exists(), "the client of a killed engine goes on")


def test_the_client_says_nothing_on_the_engines_streams(master, owner, open_tier, capfd):
    tier = open_tier(master, timeout=3)
    answered(lambda: works(tier))
    with master.stopped(), pytest.raises(BackendError):
        tier.contains(KEYS)
    tier.close()
    assert capfd.readouterr() == ("", "")


def test_an_engine_does_not_start_without_a_client(open_tier, tmp_path, monkeypatch):
    """That is a matter of what is installed, and does not pass."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BackendError, match="no client of Mooncake: libibverbs.so.1.*README") as refused:
        open_tier(Master(log=tmp_path / "log"))
    assert type(refused.value).__name__ == "NoClient"
