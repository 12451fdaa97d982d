"""The order keeps the laws of a policy. This file is all that it takes to know."""

from kvtier_core.testing import PolicyLaws
from kvtier_example_policy.plugin import ExamplePolicyConfig


class TestExamplePolicy(PolicyLaws):
    def config(self, folder):
        return ExamplePolicyConfig()
