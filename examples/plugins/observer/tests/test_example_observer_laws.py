"""The observer keeps the laws. This file is all that it takes to know."""

from kvtier_core.testing import ObserverLaws
from kvtier_example_observer.plugin import ExampleObserverConfig


class TestExampleObserver(ObserverLaws):
    def config(self, folder):
        return ExampleObserverConfig()
