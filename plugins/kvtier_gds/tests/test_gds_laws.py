"""The slabs keep the laws: one and three, with the page cache and past it."""

import pytest
from slabs import place_of

from kvtier_gds.config import GdsConfig
from kvtier_testing import BackendLaws


class Slabs(BackendLaws):
    persistent = True

    def spoil(self, folder, key):
        """Other bytes where the frame lies: no reader can tell that from a drive that lost them."""
        file, record = place_of(key, *(path for path in folder.iterdir() if path.is_dir()))
        with open(file, "r+b") as slab:
            slab.seek(record.at)
            slab.write(bytes(record.nbytes))
        return True

    def context(self, model="tiny", capacity=16 << 20):
        """Each law makes whole slabs."""
        return super().context(model, capacity)


class TestOneDirect(Slabs):
    def config(self, folder):
        return GdsConfig(paths=(folder / "kv",), mode="gds")


@pytest.mark.more
class TestThreeBuffered(Slabs):
    def config(self, folder):
        return GdsConfig(paths=tuple(folder / name for name in "abc"), direct="off", mode="gds")


del Slabs  # it has no config, and is no suite
