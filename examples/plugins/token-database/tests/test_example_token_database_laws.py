"""The names keep the laws of a token database. This file is all that it takes to know."""

from kvtier_core.testing import TokenDatabaseLaws
from kvtier_example_token_database.plugin import ExampleTokenDatabaseConfig


class TestExampleTokenDatabase(TokenDatabaseLaws):
    def config(self, folder):
        return ExampleTokenDatabaseConfig()
