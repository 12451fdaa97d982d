"""The encoding keeps the laws of a serializer. This file is all that it takes to know."""

from kvtier_core.testing import SerializerLaws
from kvtier_example_serializer.plugin import ExampleSerializerConfig


class TestExampleSerializer(SerializerLaws):
    def config(self, folder):
        return ExampleSerializerConfig()

    def others(self, folder):
        return [ExampleSerializerConfig(level=9)]
