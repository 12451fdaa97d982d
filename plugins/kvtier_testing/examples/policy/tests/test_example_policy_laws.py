"""The order keeps the laws of a policy. This file is all that it takes to know."""

from kvtier_example_policy.plugin import ExamplePolicyConfig
from kvtier_testing import PolicyLaws


class TestExamplePolicy(PolicyLaws):
    def config(self, folder):
        return ExamplePolicyConfig()
