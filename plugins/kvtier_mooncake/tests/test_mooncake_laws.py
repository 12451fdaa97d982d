"""Mooncake Store keeps the laws, over TCP."""

from __future__ import annotations

import contextlib

import pytest
from servers.mooncake import one_master

from kvtier_mooncake.config import MooncakeConfig
from kvtier_testing import Proxy, SharedBackendLaws
from kvtier_testing.samples import make_namespace


@pytest.mark.more
class TestMooncake(SharedBackendLaws):
    persistent = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with (
            one_master(tmp_path_factory.mktemp("mooncake")) as master,
            master.owner(512 << 20),
            Proxy(("127.0.0.1", master.port)) as proxy,
        ):
            cls.master, cls.proxy = master, proxy
            yield

    def config(self, folder):
        return MooncakeConfig(master=f"127.0.0.1:{self.proxy.port}", prefix=f"kv/{folder.name}")

    @contextlib.contextmanager
    def stalled_store(self, folder):
        with self.master.stopped():
            yield True

    @contextlib.contextmanager
    def interrupted(self, folder):
        """Between the engine and the master."""
        self.proxy.drop()
        yield True
        self.proxy.heal()

    def spoil(self, folder, key):
        """Somebody else keeps something else under the name of the frame."""
        name = f"kv/{folder.name}/{make_namespace().digest.hex()[:16]}/{key.hex()}"
        assert self.master.ask(["upsert", name, b"nothing"]) == [0]
        return True
