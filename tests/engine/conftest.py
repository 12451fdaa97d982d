"""An engine of a hundred lines that tells its status over its socket."""

from __future__ import annotations

import contextlib

import pytest
from fake_host import ABOUT, CHUNK, FRAME, Host

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.open import log_warning
from kvtier_core.config.registry import Registry


@pytest.fixture
def host(tmp_path):
    """``host(**settings)`` is a host that tells its status at ``tmp_path / "s"``, over memory and a disk."""
    with contextlib.ExitStack() as closing:

        def start(chunks=32, about=ABOUT, clock=None, **settings):
            heap = {"type": "heap", "capacity": f"{chunks * FRAME}B", "eviction": "lru"}
            disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": f"{100 * FRAME}B", "min_free": "0B"}
            values = {"version": 1, "chunk_tokens": CHUNK, "load_wait": "10s", "tiers": [heap, disk]}
            config = load_config({**values, "status": str(tmp_path / "s"), **settings}, Registry.of(kvtier_disk.plugin))
            made = Host(config, **({"clock": clock} if clock else {}))
            closing.callback(made.close)
            made.side.status.open(config.status, about, log_warning)
            return made

        yield start


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"
