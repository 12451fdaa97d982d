"""The dict keeps the laws of a backend. This file is all that it takes to know."""

from kvtier_core.testing import BackendLaws
from kvtier_example_backend.plugin import ExampleBackendConfig


class TestExampleBackend(BackendLaws):
    def config(self, folder):
        return ExampleBackendConfig()
