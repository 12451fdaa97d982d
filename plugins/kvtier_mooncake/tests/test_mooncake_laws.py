"""Mooncake Store keeps the laws, over TCP."""

from __future__ import annotations

import contextlib

import pytest
from servers.mooncake import one_master

from kvtier_core.testing import SharedBackendLaws
from kvtier_mooncake.config import MooncakeConfig


class TestMooncake(SharedBackendLaws):
    persistent = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with one_master(tmp_path_factory.mktemp("mooncake")) as master, master.owner(512 << 20):
            cls.master = master
            yield

    def config(self, folder):
        return MooncakeConfig(master=self.master.address, prefix=f"kv/{folder.name}")

    @contextlib.contextmanager
    def stalled_store(self, folder):
        with self.master.stopped():
            yield True
