"""The encoding keeps the laws of a serializer. This file is all that it takes to know."""

from kvtier_example_serializer.plugin import ExampleSerializerConfig
from kvtier_testing import SerializerLaws


class TestExampleSerializer(SerializerLaws):
    def config(self, folder):
        return ExampleSerializerConfig()

    def others(self, folder):
        return [ExampleSerializerConfig(level=9)]
