"""The names keep the laws of a token database. This file is all that it takes to know."""

from kvtier_example_token_database.plugin import ExampleTokenDatabaseConfig
from kvtier_testing import TokenDatabaseLaws


class TestExampleTokenDatabase(TokenDatabaseLaws):
    def config(self, folder):
        return ExampleTokenDatabaseConfig()
