"""`kill -9` of real engines at seeded moments under load; each starts on what the ones before it left.

What may be demanded of the folder is known from what was told (chaos.py), and is exact: a frame that was reported
WRITTEN lies there, whole, unless its removal was told. That is told before the file is touched, so a delete that
arrived in the last instant is not taken for a loss.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_hybrids
from chaos import HANG, POOL, Life, arenas_of, asked, make_plugin
from chunk_files import sizes
from fork_server import ForkServer, pids
from real_engines import CHUNK, Answer, cpu_and_disk
from sizes import LONG
from test_serving import NOISE

from kvtier_core.builtin.chained import Chained
from kvtier_core.frames.format import verify
from kvtier_core.layouts import chunk_key, part_key
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, Namespace

pytestmark = pytest.mark.long

ROUNDS = 20 * LONG
HYBRID_ROUNDS = 9 * LONG

#: When the kill comes, round after round. Some are aimed: ``writing`` and ``removing`` when a file is about to be
#: touched, ``torn`` in the middle of a frame, ``rename`` between its last byte and its name. In the rounds ``engine``
#: and ``worker`` vLLM has processes of its own, and only that one is killed.
MOMENTS = (
    "load", "writing", "start", "removing", "torn", "at once", "close", "writing", "rename", "engine",
    "load", "torn", "start", "removing", "rename", "load", "close", "writing", "load", "worker",
)  # fmt: skip
WITHIN = {"torn": "pwritev", "rename": "replace"}
VICTIMS = {"engine": "EngineCore", "worker": "VllmWorker-0"}
#: Bytes of shared memory without which vLLM starts no processes of its own.
QUEUES = 241 << 20
FRONT = "MainProcess"

#: Each of these must have come to pass.
AIMED = (*(f"killed: {moment}" for moment in MOMENTS), "served from disk by the next", "damage was refused")
#: And of these, to which a kill is not aimed, each in a campaign that has many rounds.
CHANCE = (
    "killed while it starts",
    "killed under load, before anything was written",
    "killed under load, after something was written",
    "killed in the middle of a write",
    "killed in the middle of a delete",
    "killed while it closes",
)


class Ledger:
    """What was told of a store, and so what must lie in it. Keys are in hex; no two namespaces have one in common."""

    def __init__(self, store: Path) -> None:
        self.namespaces: dict[str, Namespace] = {}  # by the names of their folders
        self._store = store
        self.home = ""  # that of the engine alive
        self.promised: set[str] = set()
        self.removed: set[str] = set()
        self.leaving: set[str] = set()  # removed by the engine alive for want of room, and not yet reported
        self.harmed: set[str] = set()  # spoiled by us

    def turn_to(self, home: str) -> None:
        """Another engine is about to start."""
        self.home = home
        self.leaving.clear()

    def hear(self, *words: Any) -> None:
        match words:
            case "namespace", digest:
                self.home = digest[:16]
                namespace = Namespace.from_json((self._store / self.home / "namespace.json").read_text())
                assert namespace.digest.hex() == digest
                self.namespaces[self.home] = namespace
            case "placing", path:
                self.removed.discard(key_of(path))
                self.harmed.discard(key_of(path))
            case "removing", path:
                self.removed.add(key_of(path))
                self.promised.discard(key_of(path))
                if path.startswith(f"{self.home}/"):
                    self.leaving.add(key_of(path))
            case "written", key:
                if key not in self.removed:  # a report may come late, when the frame has left again
                    self.promised.add(key)
            case "evicted", key:
                assert key not in self.promised, f"{key} was evicted, and its file never removed"
                self.leaving.discard(key)
            case "corrupt", key:
                assert key in self.harmed, f"{key} is damaged, and nobody harmed it"
            case ("missing" | "io_error") as what, key:
                pytest.fail(f"{key}: {what}, and nobody harmed the folder")


class Campaign:
    """Round after round on one folder."""

    #: Bytes of the disk: half of the frames of the pool. The arena has room for a third of those.
    capacity = 16 << 20
    blocks = 256  #: of the engine

    def __init__(self, folder: Path, model: Path, fork_server: ForkServer):
        self.rounds = 0
        self.phases: Counter[str] = Counter()
        self._folder = folder
        self._model = model
        self._fork_server = fork_server
        self._lives = itertools.count()
        make_plugin(folder / "plugin")
        self._begin_anew()
        with self._life() as life:
            self._truth = dict(answers(words for number in range(POOL) for words in life.do("ask", number)))

    def round(self, number: int) -> None:
        self.rounds += 1
        try:
            self._round(number, MOMENTS[number % len(MOMENTS)], random.Random(f"round {number}"))
        except BaseException:
            self._begin_anew()  # the next round shall not fail for what this one left
            raise

    def _begin_anew(self) -> None:
        self._store = self._folder / f"store-{self.rounds}"
        self._ledger = Ledger(self._store)
        self._homes: dict[tuple[int, str], str] = {}  # ranks and way to identify weights -> namespace

    def _round(self, number: int, moment: str, drawn: random.Random) -> None:
        ranks = 2 if number % 40 == 39 else 1
        weights = drawn.choice(["full", "full", "sampled"])  # in other words: one of two namespaces
        self._ledger.turn_to(self._homes.get((ranks, weights), ""))
        harmed = self._cut_power(drawn, short=number % 4 == 3) if number % 2 else []
        # A ring writes without any function of ``os`` in which the engine could die.
        io = "calls" if moment == "torn" else "auto"
        stack = self._stack(direct=drawn.choice(["auto", "off"]), io=io) | {"identity": {"weights": weights}}
        arenas: set[int] = set()
        with self._life(stack, moment, tensor_parallel_size=ranks) as life:
            if moment == "start":
                self._compare(life.listen(drawn.uniform(0, 0.6)))
            else:
                life.expect("up")
                self._homes[ranks, weights] = self._ledger.home
                self._verify(life, harmed, drawn, processes=moment in VICTIMS)
                arenas = self._arenas(life)
                self._serve_until(life, moment, drawn)
            if moment not in WITHIN:
                life.kill(VICTIMS.get(moment, FRONT))
            # Where it has processes of its own, vLLM's front may wait for ever for an engine that is dead.
            others = [name for name in life.processes if name != FRONT] if moment in VICTIMS else [FRONT]
            self._compare(life.listen(HANG, *others))
            assert not life.living(*others), f"not all of {others} are dead\n{life.log}"
            self._note(life, moment)
        holders = [pid for pid in pids() if arenas & arenas_of(pid)]
        assert not holders, f"{holders} have the memory of the dead"
        self._inspect()

    def _stack(self, **access: str) -> dict[str, Any]:
        told = {"type": "told"}
        # As long as it takes: on a busy machine, too, what lies there is a hit.
        stack = cpu_and_disk(self._store, f"{self.capacity // 3}B", load_wait="60s", token_database=told)
        stack["tiers"][1] |= {"capacity": f"{self.capacity}B", **access}
        return stack

    @contextlib.contextmanager
    def _life(self, stack: dict[str, Any] | None = None, moment: str = "", **options: Any) -> Iterator[Life]:
        environment = {"CHAOS_STORE": str(self._store), "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        if moment in VICTIMS:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        life = Life(
            self._fork_server,
            self._folder / f"life-{next(self._lives)}",
            self._ledger.hear,
            environment=environment,
            plugin=str(self._folder / "plugin"),
            model=str(self._model),
            stack=stack,
            options={"num_gpu_blocks_override": self.blocks, **options},
        )
        try:
            yield life
        finally:
            self._fork_server.kill()
            life.close()

    def _serve_until(self, life: Life, moment: str, drawn: random.Random) -> None:
        """Load, until it is time to kill; within a function of ``os`` the engine kills itself."""
        endless, seed = 1 << 30, str(drawn.random())
        life.counts["written"] = 0  # from now on
        match moment:
            case "at once":
                life.order("serve", seed, endless)
            case "load" | "engine" | "worker":
                life.order("serve", seed, endless)
                self._compare(life.listen(drawn.uniform(0, 2)))
            case "writing" | "removing":
                life.order("serve", seed, endless)
                self._compare(life.expect(moment, times=drawn.randrange(1, 50)))
            case "torn" | "rename":
                life.do("die in", WITHIN[moment], drawn.randrange(50))
                life.order("serve", seed, endless)
            case "close":
                self._compare(life.do("serve", seed, drawn.randrange(2, 8)))
                life.order("close", drawn.randrange(1 << 30))
                life.expect("closing")
                life.expect("writing", times=drawn.randrange(1, 9))
                self._compare(life.listen(drawn.uniform(0, 0.02)))

    def _cut_power(self, drawn: random.Random, *, short: bool) -> list[int]:
        """Spoil a frame as a power cut may, for none was ever synced; the prompt that would be given it."""
        candidates = [number for number in range(POOL) if self._lying(number)]
        if not candidates:
            return []
        prompt = drawn.choice(candidates)
        key = self._lying(prompt)[-1]
        path = self._frames()[key]
        half = path.stat().st_size // 2
        with open(path, "r+b") as file:
            if short:
                file.truncate(half // FRAME_ALIGNMENT * FRAME_ALIGNMENT + drawn.randrange(2))
            else:
                file.seek(half)
                file.write(bytes(half))
        self._ledger.harmed.add(key)
        self._ledger.promised.discard(key)
        return [prompt]

    # -- what must hold ----------------------------------------------------------------------------------

    def _verify(self, life: Life, harmed: list[int], drawn: random.Random, *, processes: bool) -> None:
        """The engine is up: what the ones before it promised is there, and is served."""
        strange = [path for path in self._store.glob("*/*/*") if path.suffix != ".kv"]
        assert not strange, f"left behind: {strange}"
        most = sorted(drawn.sample(range(POOL), POOL), key=lambda number: len(self._lying(number)))[-3:]
        if processes:  # there is no looking into another process, nor a rest after the first answer
            self._verify_one(life, most[-1])
            return
        self._look(life)
        for number in [*harmed, *most]:
            self._verify_one(life, number)
            self._look(life)

    def _verify_one(self, life: Life, number: int) -> None:
        """As many chunks as lie there are hits."""
        cold = not life.counts["answer"]
        lying = len(self._lying(number))
        told = life.do("ask", number)
        self._compare(told)
        ((_, answer),) = answers(told)
        assert answer.cached >= lying * CHUNK, f"prompt {number}: {lying} chunks lie there, {answer.cached} tokens hit"
        self.phases["served from disk by the next"] += cold and lying > 0

    def _look(self, life: Life) -> None:
        """What the tier believes to lie on the disk, and nothing else, lies there."""
        told = life.do("look")
        frames = {key: path for key, path in self._frames().items() if home_of(path) == self._ledger.home}
        for words in told:
            if words[0] == "memo":
                frames.pop(words[1], None)
        assert {words[1] for words in told if words[0] == "indexed"} == frames.keys()
        assert [words[1] for words in told if words[0] == "accounted"] == [nbytes_of(frames)]

    def _arenas(self, life: Life) -> set[int]:
        """Shared memory: one arena, and nobody has it but who told of himself in this life."""
        holders = {pid: found for pid in self._fork_server.members() if (found := arenas_of(pid))}
        assert holders.keys() <= life.pids
        (arena,) = set().union(*holders.values())
        return {arena}

    def _inspect(self) -> None:
        """At rest, before anybody opens the folder again."""
        frames = self._frames()
        lost = self._ledger.promised - frames.keys()
        assert not lost, f"{len(lost)} frames were reported WRITTEN, never removed, and are gone"
        good = frames.keys() - self._ledger.harmed
        for key in good:
            whole = memoryview(frames[key].read_bytes())
            damage = verify(whole, self._ledger.namespaces[home_of(frames[key])], bytes.fromhex(key))
            assert damage is None, f"{frames[key]}: {damage.value}"
        assert nbytes_of(frames) <= self.capacity
        self._ledger.promised |= good  # of some the report did not come through; from now on they are owed, too

    def _compare(self, told: Iterable[tuple]) -> None:
        for number, answer in answers(told):
            assert answer.differs(self._truth[number]) < NOISE, f"prompt {number}, {answer.cached} tokens hit"

    def _note(self, life: Life, moment: str) -> None:
        """What the kill fell into, by what it left."""
        when = "after something" if life.counts["written"] else "before anything"
        self.phases[f"killed under load, {when} was written"] += life.counts["up"]
        self.phases["killed while it starts"] += not life.counts["up"]
        self.phases["killed while it closes"] += bool(life.counts["closing"])
        self.phases["killed in the middle of a write"] += any(self._store.glob("*/*/*.tmp"))
        self.phases["killed in the middle of a delete"] += bool(self._ledger.leaving)
        self.phases[f"killed: {moment}"] += 1
        self.phases["damage was refused"] += life.counts["corrupt"]

    # -- looking at the folder ---------------------------------------------------------------------------

    def _frames(self) -> dict[str, Path]:
        return {key_of(path): path for path in sizes(self._store) if path.suffix == ".kv"}

    def _lying(self, number: int) -> list[str]:
        """The leading chunks of a prompt that lie on the disk for the engine alive, and that nobody harmed."""
        good = self._frames().keys() - self._ledger.harmed
        return list(itertools.takewhile(good.__contains__, (key.hex() for key in self._path(number))))

    def _path(self, number: int) -> Sequence[ChunkKey]:
        """The keys of a prompt for the engine alive, if it has told its namespace."""
        namespace = self._ledger.namespaces.get(self._ledger.home)
        return Chained(namespace, CHUNK).keys(asked(number)) if namespace else []


class HybridCampaign(Campaign):
    """With windows beside full attention: what lies there counts up to a boundary with all its parts."""

    capacity = 24 << 20
    blocks = 1024
    windows = 3  #: groups of layers with a window, each a part of its own
    behind = 4  #: chunks of a window

    def _lying(self, number: int) -> list[str]:
        """The leading chunks of a prompt, up to the last boundary of which everything lies on the disk."""
        good = self._frames().keys() - self._ledger.harmed
        chunks = [chunk_key(key) for key in self._path(number)]
        leading = len(list(itertools.takewhile(lambda key: key.hex() in good, chunks)))
        boundaries = (end for end in range(leading, 0, -1) if self._parts(chunks[:end]) <= good)
        return [key.hex() for key in chunks[: next(boundaries, 0)]]

    def _parts(self, chunks: Sequence[ChunkKey]) -> set[str]:
        """What a boundary behind these chunks needs of the windows."""
        return {part_key(key, 1 + part).hex() for key in chunks[-self.behind :] for part in range(self.windows)}


def answers(told: Iterable[tuple]) -> Iterator[tuple[int, Answer]]:
    for what, *words in told:
        if what == "answer":
            number, tokens, logprobs, cached = words
            yield number, Answer(tuple(tokens), tuple(logprobs), cached)


def key_of(path: str | Path) -> str:
    return Path(path).stem


def home_of(path: Path) -> str:
    return path.parent.parent.name


def nbytes_of(frames: dict[str, Path]) -> int:
    return sum(path.stat().st_size for path in frames.values())


def named(number: int) -> str:
    return f"{number}-{MOMENTS[number % len(MOMENTS)]}"


@pytest.fixture(scope="module")
def campaign(model, fork_server, tmp_path_factory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("chaos"), model, fork_server)


@pytest.mark.parametrize("number", range(ROUNDS), ids=named)
def test_round(campaign, number):
    if MOMENTS[number % len(MOMENTS)] in VICTIMS and shutil.disk_usage("/dev/shm").free < QUEUES:
        pytest.skip("/dev/shm has too little room for the queues of vLLM's processes")
    campaign.round(number)


@pytest.fixture(scope="module")
def hybrid_campaign(fork_server, tmp_path_factory) -> Campaign:
    folder = tmp_path_factory.mktemp("chaos")
    tiny_hybrids.make("gemma3", folder / "model")
    return HybridCampaign(folder, folder / "model", fork_server)


@pytest.mark.more
@pytest.mark.parametrize("number", range(HYBRID_ROUNDS), ids=named)
def test_round_with_several_groups(hybrid_campaign, number):
    hybrid_campaign.round(number)


@pytest.mark.more
def test_boundaries_were_served_from_what_the_dead_left(hybrid_campaign):
    if hybrid_campaign.rounds < HYBRID_ROUNDS:
        pytest.skip(f"only {hybrid_campaign.rounds} rounds were run")
    phases = hybrid_campaign.phases
    assert phases["served from disk by the next"] and phases["damage was refused"], phases


def test_the_kills_fell_into_everything(campaign):
    """A campaign that hits nothing proves nothing."""
    if campaign.rounds < len(MOMENTS):
        pytest.skip(f"only {campaign.rounds} rounds were run")
    missed = [phase for phase in AIMED + (CHANCE if LONG > 1 else ()) if not campaign.phases[phase]]
    assert not missed, campaign.phases
