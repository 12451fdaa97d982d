"""The slabs keep the laws: one and three, with the page cache and past it."""

from kvtier_gds.config import GdsConfig

from kvtier_core.testing import BackendLaws


class Slabs(BackendLaws):
    persistent = True

    def context(self, model="tiny", capacity=16 << 20):
        """Each law makes whole slabs."""
        return super().context(model, capacity)


class TestOneDirect(Slabs):
    def config(self, folder):
        return GdsConfig(paths=(folder / "kv",))


class TestThreeBuffered(Slabs):
    def config(self, folder):
        return GdsConfig(paths=tuple(folder / name for name in "abc"), direct="off")


del Slabs  # it has no config, and is no suite
