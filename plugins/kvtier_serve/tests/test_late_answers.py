"""Whatever comes late, an engine is never given slots that are not pinned for it, nor reserved."""

from __future__ import annotations

import random

import pytest
from patience import wait_until
from served import LAYOUT, config_of

from kvtier_core.types import Namespace
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.protocol import Opening
from kvtier_serve.server import Server
from kvtier_testing.samples import make_keys

KEYS = make_keys(24)
PATHS = [KEYS[:6], KEYS[:4] + KEYS[10:14], KEYS[14:20]]
HOLDERS = [f"request {number}" for number in range(4)]


@pytest.mark.parametrize("seed", range(60))
def test_found_chunks_are_pinned_even_if_the_answer_is_late(seed, tmp_path):
    drawn = random.Random(seed)
    server = Server(config_of(12), tmp_path / "s")

    def answer():
        while server.turn(0):
            pass

    opening = Opening("model", "engine", Namespace.of({"model": "model"}), LAYOUT)
    stack = RemoteStack(server.path, opening, Waits(0.0, 0.0, 0.0))
    wait_until(lambda: answer() or stack.step() or list(server.spaces))  # its tiers are opened on a thread
    answer()
    stack.step()
    (space,) = server.spaces
    arena, stores, found_any = space.stack.arenas[0], 0, 0
    for _ in range(300):
        match drawn.randrange(6):
            case 0 | 1:
                holder = drawn.choice(HOLDERS)
                slots = stack.lookup(drawn.choice(PATHS), holder).slots
                if slots:
                    answer()
                    found_any += 1
                    pinned = arena._pins.get(f"1/{holder}", {})
                    assert {slot.index for slot in slots} <= set(pinned), "they are not pinned"
            case 2:
                stack.release(drawn.choice(HOLDERS))
            case 3:
                stores += 1
                path = drawn.choice(PATHS)
                if drawn.random() < 0.5:
                    answer()
                if slots := stack.reserve(path, f"store {stores}"):
                    answer()
                    assert all(arena.is_reserved(key) for key in slots), "they are not reserved"
                    stack.commit(f"store {stores}")
                else:  # late, and given up; so that something is ever there, another engine stores
                    space.stack.reserve(path, "another")
                    space.stack.commit("another") if arena.reserved else None
            case 4:
                answer()
            case 5:
                stack.step()
    for holder in HOLDERS:
        stack.release(holder)
    answer()
    assert found_any and not arena.pins and not arena.reserved
    stack.close(0.0)
    answer()
    server.close(0.0)
