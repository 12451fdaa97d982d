"""The chunks that a tier holds, and the order in which they may be evicted."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from kvtier_core.interfaces import EvictionPolicy, SupportsSparing
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.index.prefix_tree import PrefixTree
from kvtier_core.stack.index.write_budget import WriteBudget
from kvtier_core.types import ChunkKey

#: Keys whose requests are counted: at least this many, at most twice as many.
_REMEMBERED = 1 << 17
#: Bytes that are kept of each key. Keys with the same beginning count as one: at worst a chunk is stored too early.
_PREFIX_NBYTES = 8

#: Selects the chunks of a path to admit.
Admitted = Callable[[Sequence[ChunkKey]], Sequence[ChunkKey]]


class CacheIndex:
    """The resident keys of one tier, and its eviction policy.

    The policy determines the order of eviction. If the policy is ``leaf_first``, this class passes over a chunk with a
    resident child in the prefix tree: without its parent a child could not be reached.
    """

    def __init__(self, policy: EvictionPolicy, store_after: int = 1, budget: WriteBudget | None = None):
        """A chunk is admitted once ``store_after`` requests have named it, if ``budget`` allows."""
        self.resident = PrefixTree()  #: the keys with their sizes, places and parents; changed by `admit` and `remove`
        self.policy = policy
        self._spares = policy if isinstance(policy, SupportsSparing) else None
        self.budget = budget  #: of the tier's writes; None: no limit
        self._store_after = store_after
        self._frequency = FrequencyFilter() if store_after > 1 or budget else None

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.resident

    def __len__(self) -> int:
        return len(self.resident)

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """A request names these chunks, root first, resident or not."""
        if self._frequency:
            self._frequency.note(path)
        self.resident.adopt(path)
        self.policy.request(path, now, hints)

    def chunk_of(self, key: ChunkKey) -> ChunkKey:
        """The key of the chunk to which a part belongs."""
        return key

    def with_their_parts(self, keys: Sequence[ChunkKey], admitted: Admitted) -> list[ChunkKey]:
        """The ``keys`` to admit: chunks that ``admitted`` selects, and other parts of admitted or resident chunks.

        ``admitted(path)`` returns the chunks to admit from a path of chunks, root first, that are not resident.
        """
        return list(admitted(keys))

    def other_parts(self, chunks: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys of the resident parts of these chunks, without their first parts."""
        return []

    def meets_frequency(self, path: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """The leading chunks of a path that enough requests have named."""
        frequency = self._frequency
        if frequency is None or self._store_after == 1:
            return path
        return leading_run(path, lambda key: frequency.of(key) >= self._store_after)

    def affordable(self, path: Sequence[ChunkKey], nbytes: int) -> Sequence[ChunkKey]:
        """The leading chunks of a path, of ``nbytes`` each, that the budget allows to write now."""
        if self.budget is None or self._frequency is None:
            return path
        return path[: self.budget.affords(map(self._frequency.of, path), nbytes)]

    def admit(
        self,
        keys: Sequence[ChunkKey],
        parents: Sequence[ChunkKey | None],
        nbytes: int,
        places: Sequence[int] | None = None,
    ) -> None:
        """Add keys of a path, root first, of ``nbytes`` each. ``places`` are numbers to store with them."""
        self.resident.add(keys, parents, nbytes, [0] * len(keys) if places is None else places)
        for key in reversed(keys):  # leaves before their root
            self.policy.admit(key, nbytes)

    def remove(self, keys: Sequence[ChunkKey], *, evicted: bool = False) -> list[int]:
        """Remove these keys; returns their places. The policy may keep ghosts of ``evicted`` keys."""
        places = self.resident.remove(keys)
        for key in keys:
            self.policy.forget(key, evicted=evicted)
        self._unspare()
        return places

    def detach(self, keys: Sequence[ChunkKey]) -> None:
        """These keys are about to leave: they no longer keep their parents from eviction."""
        self.resident.detach(keys)
        self._unspare()

    def select_victims(
        self,
        amount: int,
        weigh: Callable[[ChunkKey], int],
        spared: Sequence[Container[ChunkKey | None]] = (),
        pinned: Container[int] = (),
        among: Sequence[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The best victims, in order, that together weigh ``amount``, or all if they weigh less. Evicts nothing.

        Passes over keys in any of the ``spared``, and keys whose place is ``pinned``. ``among`` are resident keys, the
        best victim first: only these are looked at, and in this order instead of the policy's.
        """
        chosen: list[ChunkKey] = []
        passed: list[ChunkKey] = []
        candidates = self._eviction_candidates(spared, pinned, passed, among)
        while amount > 0 and (leaving := next(candidates, None)) is not None:
            chosen += leaving
            amount -= sum(map(weigh, leaving))
        if among is None:
            self._spare(passed)
        return chosen

    def plan_admission(
        self,
        newcomers: Sequence[ChunkKey],
        nbytes: int,
        room: int,
        weigh: Callable[[ChunkKey], int],
        spared: Sequence[Container[ChunkKey | None]] = (),
        pinned: Container[int] = (),
        *,
        promised: bool = False,
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """The leading newcomers of a path to admit at ``nbytes`` each, and the victims they need. Evicts nothing.

        A newcomer is refused if the policy does not prefer it to each of its victims; then all after it are, too. The
        policy is not asked about ``promised`` ones.
        """
        free = min(len(newcomers), max(room, 0) // nbytes)
        admitted, victims = list(newcomers[:free]), []
        room -= free * nbytes
        passed: list[ChunkKey] = []
        candidates = self._eviction_candidates(spared, pinned, passed)
        for newcomer in newcomers[free:]:
            needed: list[ChunkKey] = []
            while room < nbytes:
                leaving = next(candidates, None)
                if leaving is None or not (promised or self._prefers(newcomer, leaving[0])):
                    break
                needed += leaving
                room += sum(map(weigh, leaving))
            if room < nbytes:
                break
            room -= nbytes
            admitted.append(newcomer)
            victims += needed
        self._spare(passed)
        return admitted, victims

    def _prefers(self, newcomer: ChunkKey, victim: ChunkKey) -> bool:
        """Does the policy prefer the newcomer?"""
        return self.policy.prefers(newcomer, victim)

    def _spare(self, passed: Sequence[ChunkKey]) -> None:
        """The policy need not name these parents again, so that no search walks past them twice."""
        if self._spares:
            self.resident.park(passed)
            for key in passed:
                self._spares.spare(key)

    def _unspare(self) -> None:
        if self._spares:
            for key in self.resident.take_freed():
                self._spares.unspare(key)

    def _eviction_candidates(
        self,
        spared: Sequence[Container[ChunkKey | None]],
        pinned: Container[int],
        passed: list[ChunkKey],
        among: Sequence[ChunkKey] | None = None,
    ) -> Iterator[Sequence[ChunkKey]]:
        """Groups of keys that leave together, best first, each assuming that all before it are evicted.

        Keys that are passed over because of a resident child are appended to ``passed``.
        """
        victims, leaf_first = self.policy.victims() if among is None else iter(among), self.policy.leaf_first
        return ((key,) for key in self.resident.eviction_candidates(victims, spared, pinned, leaf_first, passed))


class FrequencyFilter:
    """Two generations of counts: when the younger is full, it replaces the older one."""

    def __init__(self) -> None:
        self._younger: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    def note(self, keys: Iterable[ChunkKey]) -> None:
        """A request names these keys."""
        for key in keys:
            self._younger[key[:_PREFIX_NBYTES]] = self.of(key) + 1
            if len(self._younger) >= _REMEMBERED:
                self._older, self._younger = self._younger, {}

    def of(self, key: ChunkKey) -> int:
        """Number of requests that named this key, if the two generations remember it."""
        short = key[:_PREFIX_NBYTES]
        return self._younger.get(short) or self._older.get(short, 0)
