"""The memory keeps the laws of an arena. This file is all that it takes to know."""

from kvtier_example_arena.plugin import ExampleArenaConfig
from kvtier_testing import ArenaLaws


class TestExampleArena(ArenaLaws):
    def config(self, folder):
        return ExampleArenaConfig()
