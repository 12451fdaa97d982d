"""The observer keeps the laws. This file is all that it takes to know."""

from kvtier_example_observer.plugin import ExampleObserverConfig
from kvtier_testing import ObserverLaws


class TestExampleObserver(ObserverLaws):
    def config(self, folder):
        return ExampleObserverConfig()
