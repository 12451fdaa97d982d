"""No law of any suite without a broken plugin that it is seen to catch, in CI."""

from __future__ import annotations

import pytest
import test_arena_laws_bite
import test_laws_bite
import test_observer_laws_bite
import test_other_laws_bite
import test_shared_laws_bite
import test_shared_trouble_laws_bite

import kvtier_testing
from kvtier_testing import ArenaLaws, BackendLaws, ObserverLaws, SharedBackendLaws, laws_of

SUITES = [getattr(kvtier_testing, name) for name in kvtier_testing.__all__ if name.endswith("Laws") and name != "Laws"]
_OF_STORES = {law for _, law in test_laws_bite.BUGS}
#: The laws that a broken plugin has been planted for.
BITING = {
    ArenaLaws: {law for _, law in test_arena_laws_bite.BUGS},
    BackendLaws: _OF_STORES,
    ObserverLaws: {law for _, _, law in test_observer_laws_bite.BUGS},
    SharedBackendLaws: _OF_STORES
    | {law for _, law, _ in test_shared_laws_bite.BUGS}
    | {law for _, law, _ in test_shared_trouble_laws_bite.BUGS},
    **{suite.__base__: {law for _, law in bugs} for suite, bugs in test_other_laws_bite.BUGS.items()},
}


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__)
def test_each_law_has_a_broken_plugin(suite):
    """The law about imports is the same in every suite; `test_laws_bite` plants two plugins for it."""
    assert set(laws_of(suite)) - BITING.get(suite, set()) == {"test_import_is_light"}
