"""The engines that a GPU is checked with: larger pages, and forwards that take the device longer than the host."""

from __future__ import annotations

import attrs

from device_engine.bugs import BUGS
from device_engine.setup import Setup

_ENGINE = Setup(
    device="cuda:0",
    seed=1,
    block_tokens=16,
    chunk_tokens=32,
    token_words=(512,) * 4,
    blocks=200,
    slots=40,
    budget=128,
    active=8,
    prompt_tokens=500,
    busy=60,
)

KINDS = {
    "pages of 64 KiB": _ENGINE,
    "pages of 8 KiB": attrs.evolve(_ENGINE, token_words=(64,) * 8, slots=60),
    "one block a chunk, pages of 512 KiB": attrs.evolve(_ENGINE, chunk_tokens=16, token_words=(4096,)),
    "one block a chunk, layers side by side": attrs.evolve(_ENGINE, chunk_tokens=16, block_major=True),
    "an arena that is page-locked meanwhile": attrs.evolve(_ENGINE, slots=4096),
    "copies that fail": attrs.evolve(_ENGINE, failures=0.05),
    "two ranks on one device": attrs.evolve(_ENGINE, ranks=2, busy=30),
    "memory that is unmapped in its sleep": attrs.evolve(_ENGINE, sleeps=True),
    "two arenas": attrs.evolve(_ENGINE, slots=20, slots_below=200),
    "packed slots": attrs.evolve(_ENGINE, packs=True),
    "new blocks are zeroed, and stores fenced at once": attrs.evolve(_ENGINE, zeroes=True),
}
REQUESTS = 120

#: Those that a real device is likely to show in a few hundred requests; the simulated one shows all.
PLANTED = {
    name: attrs.evolve(_ENGINE, bug=name, **BUGS[name].setup)
    for name in (
        "a store does not wait for the forward",
        "no fence",
        "a load is reported before its event",
    )
}
