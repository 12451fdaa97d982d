"""The dict keeps the laws of a backend. This file is all that it takes to know."""

from kvtier_example_backend.plugin import ExampleBackendConfig
from kvtier_testing import BackendLaws


class TestExampleBackend(BackendLaws):
    def config(self, folder):
        return ExampleBackendConfig()
