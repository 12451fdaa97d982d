"""The memory keeps the laws of an arena. This file is all that it takes to know."""

from kvtier_core.testing import ArenaLaws
from kvtier_example_arena.plugin import ExampleArenaConfig


class TestExampleArena(ArenaLaws):
    def config(self, folder):
        return ExampleArenaConfig()
