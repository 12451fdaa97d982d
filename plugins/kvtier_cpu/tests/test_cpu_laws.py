"""The memory keeps the laws of an arena, with huge pages and without."""

import pytest

from kvtier_cpu.config import CpuConfig
from kvtier_testing import ArenaLaws


class TestCpuLaws(ArenaLaws):
    def config(self, folder):
        return CpuConfig()


@pytest.mark.more
class TestOrdinaryPages(ArenaLaws):
    def config(self, folder):
        return CpuConfig(huge_pages="off")
