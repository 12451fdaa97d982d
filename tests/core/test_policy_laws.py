"""Every policy of the core keeps the laws of policies."""

from __future__ import annotations

import pytest
from plain_policies import PLAIN_GITTINS, PLAIN_LRU, PLAIN_SIMPLE_GITTINS
from sizes import some

from kvtier_core.builtin.plugin import kvtier_eviction_policies
from kvtier_core.config.registry import Registry
from kvtier_core.policies.arc import ArcConfig
from kvtier_core.policies.fifo import FifoConfig
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lfu import LfuConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.policies.lru2 import Lru2Config
from kvtier_core.policies.mru import MruConfig
from kvtier_core.policies.s3fifo import S3FifoConfig
from kvtier_core.policies.tournament import TournamentConfig
from kvtier_core.testing import PolicyLaws
from kvtier_core.testing.samples import make_keys

CONFIGS = [
    ArcConfig(),
    FifoConfig(),
    GittinsConfig(),
    GittinsConfig(classes="simple"),
    LfuConfig(),
    Lru2Config(),
    LruConfig(),
    MruConfig(),
    S3FifoConfig(),
    TournamentConfig(),
]
#: The Python versions of those that are compiled where that is possible.
PLAIN = [PLAIN_GITTINS, PLAIN_LRU, PLAIN_SIMPLE_GITTINS]


class TestPolicies(PolicyLaws):
    @pytest.fixture(autouse=True, params=some(CONFIGS + PLAIN, GittinsConfig(), LruConfig()), ids=repr)
    def _under_test(self, request):
        self.chosen = request.param

    def config(self, folder):
        return self.chosen


def test_a_key_that_comes_back_from_the_ghosts_of_lru2_is_a_victim_once():
    """Its entry from before is still in the heap, and is valid again."""
    lru2, first, second = Lru2Config().open(), *make_keys(2)
    for key in (second, first):
        lru2.admit(key, 1)
    lru2.forget(first, evicted=True)
    lru2.admit(first, 1)
    assert sorted(lru2.victims()) == sorted([first, second])


def test_every_policy_that_is_offered_is_tried():
    assert {type(config) for config in CONFIGS} == set(kvtier_eviction_policies())


@pytest.mark.parametrize(("name", "config"), [("git", GittinsConfig), ("tour", TournamentConfig)])
def test_a_policy_can_be_chosen_by_its_short_name(name, config):
    assert Registry().choose("eviction policy", name) is config
