"""A store that holds nothing, for tests of what a store is asked and when it is closed."""

from kvtier_core.interfaces import Backend


class EmptyStore(Backend):
    def contains(self, keys):
        return [False] * len(keys)

    def read(self, keys, into):
        return [0] * len(keys)

    def write(self, keys, frames):
        return None

    def delete(self, keys):
        pass
