"""The conformance kit: how you prove that your plugin keeps the laws.

Subclass the suite of its kind, say what is under test, and let pytest collect it::

    class TestMyBackend(BackendLaws):
        persistent = True

        def config(self, folder):
            return MyConfig(path=folder)
"""

import pytest

for _suite in ("laws", "arenas", "backends", "policies", "serializers", "token_databases"):
    pytest.register_assert_rewrite(f"{__name__}.{_suite}")

from kvtier_core.testing.arenas import ArenaLaws  # noqa: E402
from kvtier_core.testing.backends import BackendLaws  # noqa: E402
from kvtier_core.testing.faults import Fault, FaultyBackend, always, every, now_and_then  # noqa: E402
from kvtier_core.testing.laws import Laws, laws_of  # noqa: E402
from kvtier_core.testing.policies import PolicyLaws  # noqa: E402
from kvtier_core.testing.serializers import SerializerLaws  # noqa: E402
from kvtier_core.testing.token_databases import TokenDatabaseLaws  # noqa: E402

__all__ = [
    "ArenaLaws",
    "BackendLaws",
    "Fault",
    "FaultyBackend",
    "Laws",
    "PolicyLaws",
    "SerializerLaws",
    "TokenDatabaseLaws",
    "always",
    "every",
    "laws_of",
    "now_and_then",
]
