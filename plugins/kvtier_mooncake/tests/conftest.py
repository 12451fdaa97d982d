"""A master and a client that lends it memory, and tiers on it that are closed."""

from __future__ import annotations

import attrs
import pytest
from patience import HANG
from servers.mooncake import ROOM, one_master

from kvtier_core.types import Seconds
from kvtier_mooncake.config import MooncakeConfig
from kvtier_testing.samples import make_context


@pytest.fixture
def master(tmp_path):
    """A master without any memory."""
    with one_master(tmp_path / "mooncake") as master:
        yield master


@pytest.fixture
def owner(master):
    """A client that lends the master 64 MiB."""
    with master.owner(ROOM) as owner:
        yield owner


@pytest.fixture
def open_tier():
    """Opens tiers on a master, with settings of MooncakeConfig and of OpenContext."""
    opened = []

    def open_tier(master, *, capacity=0, timeout=HANG, **settings):
        ctx = attrs.evolve(make_context(capacity=capacity), timeout=Seconds(timeout))
        opened.append(MooncakeConfig(master=master.address, **settings).open(ctx))
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(master, owner, open_tier):
    """A tier on the master."""
    return open_tier(master)
