"""A tier that is not required, and cannot be opened when the stack starts, is used from the time when it can."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from patience import HANG
from serving import FRAME, Serving

import kvtier_gds.plugin
from kvtier_core import BackendError
from kvtier_core.config.later import LaterTiers
from kvtier_core.work.io_pool import IOPool
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_keys, make_namespace

MINUTE = 60
KEYS = make_keys(40)
PROMPT = KEYS[:8]
#: The name of the tier that is missing, and of the one below it.
NAMES = {"disk": ("disk", "disk#2"), "gds": ("gds", "disk")}


def open_at(folder, kind="disk", *, required=False, alone=False):
    """Eight slots, above a tier that may be missing, above a shared folder."""
    where = f"path: {folder / 'kv'}, min_free: 0B"
    if kind == "gds":
        where = f"paths: [{folder / 'a'}], staging: {8 * FRAME}B, mode: bounce"
    lines = [
        f"{{type: cpu, capacity: {8 * FRAME}B, eviction: lru}}",
        f"{{type: {kind}, {where}, capacity: {64 * FRAME}B, required: {str(required).lower()}}}",
        f"{{type: disk, path: {folder / 'last'}, shared: true, capacity: {64 * FRAME}B}}",
    ]
    file = folder / f"{kind}.yaml"
    file.write_text("version: 1\nload: always\ntiers:\n" + "".join(f"  - {line}\n" for line in lines[: 3 - alone]))
    return Serving(file, kvtier_gds.plugin)


def names(stack):
    return [usage.tier for usage in stack.manager.usage()]


def attempt(stack):
    """Wait until the next attempt has ended."""
    stack.wait(MINUTE)
    stack.manager.later._pool.wait(HANG)
    stack.wait(0)


@pytest.mark.parametrize("kind", NAMES)
def test_the_next_engine_takes_a_folder_over(tmp_path, kind, caplog):
    """As in a rolling update: the next one starts while the former holds the folder, and finds what that stored."""
    caplog.set_level("INFO")
    late, last = NAMES[kind]
    former = open_at(tmp_path, kind, required=True, alone=True)
    former.ask(PROMPT)
    with open_at(tmp_path, kind) as stack:
        caplog.clear()
        attempt(stack)
        assert names(stack) == ["cpu", last] and stack.ask(PROMPT) == 0
        former.close()
        stack.wait(MINUTE / 2)
        assert names(stack) == ["cpu", last]
        attempt(stack)
        assert names(stack) == ["cpu", late, last]
        assert caplog.messages == [f"kvtier: {late}: opened, and used from now on"]
        stack.ask(KEYS[8:16])  # the prompt leaves the slots
        assert stack.ask(PROMPT) == 8 and "promoted" in stack.seen
        assert len(stack.manager.tiers[0].index) == 16
        assert late not in stack.manager.reader_handles, "no worker knows the way to it"
        assert stack.manager.shared == [last]
    with open_at(tmp_path, kind) as again:
        assert names(again) == ["cpu", late, last] and len(again.manager.tiers[0].index) == 16


def test_a_tier_that_opens_after_a_change_of_weights_has_nothing_from_before_it(tmp_path):
    former = open_at(tmp_path, required=True, alone=True)
    former.ask(PROMPT)
    with open_at(tmp_path) as stack:
        stack.manager.invalidate_all(make_namespace("new weights"))
        former.close()
        attempt(stack)
        assert names(stack) == ["cpu", "disk", "disk#2"]
        assert stack.ask(PROMPT) == 0
        stack.ask(KEYS[8:16])
        assert stack.ask(PROMPT) == 8


def test_a_store_that_hangs_while_it_opens_delays_no_step_and_no_end(tmp_path, monkeypatch):
    opens, opening = threading.Event(), threading.Event()
    real = DiskConfig.open

    def hanging(config, ctx):
        if config.shared:
            return real(config, ctx)
        if not failed:
            failed.append(config)
            raise BackendError("not there")
        opening.set()
        assert opens.wait(HANG)
        return real(config, ctx)

    failed, before = [], threading.enumerate()
    monkeypatch.setattr(DiskConfig, "open", hanging)
    stack = open_at(tmp_path)
    stack.wait(MINUTE)
    assert opening.wait(HANG)
    assert stack.ask(PROMPT) == 0 and stack.ask(PROMPT[:4]) == 4
    opens.set()
    stack.close()
    assert [each for each in threading.enumerate() if each not in before] == []
    monkeypatch.undo()
    with open_at(tmp_path, required=True, alone=True) as again:
        assert names(again) == ["cpu", "disk"]


def test_tiers_are_tried_in_turn_once_a_minute_until_they_open():
    now, tried = 0.0, []

    def tier(name, fails):
        def open_it():
            tried.append(name)
            if tried.count(name) <= fails:
                raise BackendError("not there")
            return SimpleNamespace(name=name)

        return open_it

    pool = IOPool("later")
    later = LaterTiers([tier("a", 2), tier("b", 1)], pool, lambda: now)
    opened = []
    for _ in range(10):
        for _ in range(3):  # steps of the same minute
            pool.wait(HANG)
            if arrived := later.step():
                opened.append(arrived.name)
        now += MINUTE
    assert tried == ["a", "b", "a", "b", "a"]
    assert opened == ["b", "a"]
    later.close(HANG)
