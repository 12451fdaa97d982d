"""Every policy of the core keeps the laws of policies."""

from __future__ import annotations

import pytest
from plain_policies import PLAIN_GITTINS, PLAIN_LRU, PLAIN_SIMPLE_GITTINS
from sizes import some

from kvtier_core.builtin import plugin
from kvtier_core.config.registry import Registry
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_policies import plugin as policies
from kvtier_policies.arc import ArcConfig
from kvtier_policies.fifo import FifoConfig
from kvtier_policies.lfu import LfuConfig
from kvtier_policies.lru2 import Lru2Config
from kvtier_policies.mru import MruConfig
from kvtier_policies.s3fifo import S3FifoConfig
from kvtier_policies.tournament import TournamentConfig
from kvtier_testing import PolicyLaws
from kvtier_testing.samples import make_keys

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
    offered = (*plugin.kvtier_eviction_policies(), *policies.kvtier_eviction_policies())
    assert {type(config) for config in CONFIGS} == set(offered)


@pytest.mark.parametrize(("name", "config"), [("git", GittinsConfig), ("tour", TournamentConfig)])
def test_a_policy_can_be_chosen_by_its_short_name(name, config):
    assert Registry.of(policies).choose("eviction policy", name) is config
