"""Engines that can be killed at any moment, and tell what they did until then.

A fork server starts them. In each of them is a witness: a plugin of kvtier's, so that it sits in whichever process
vLLM puts the stack. It tells of each file just before it is touched, and what kvtier reports. What was told outlives a
`kill -9`. When nobody listens any more, telling fails, and the engine ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from fork_server import ForkServer

from kvtier_core.builtin.chained import Chained, ChainedConfig
from kvtier_core.hookspecs import hookimpl
from kvtier_core.stack.store_tier.request_log import keys_beside
from kvtier_core.telemetry.event_log import EventLog
from kvtier_core.types import FRAME_ALIGNMENT, Event, EventKind, Namespace

#: What is told of a frame: what became of it, and not that it was read.
_TOLD = set(EventKind) - {EventKind.READ, EventKind.ASKED}

_UNFINISHED = re.compile(r"[0-9a-f]{64}\.tmp")

POOL = 24
_FAMILIES = 6

#: Seconds after which what should have happened long ago is taken for a hang.
HANG = 100


def asked(number: int) -> list[int]:
    """A prompt of the pool: 8 chunks and a bit, of which it shares the first 4 with its family."""
    from real_engines import prompt

    return prompt(1000 + number, 530, prompt(900 + number % _FAMILIES, 256))


# -- in the engine's processes: the witness --------------------------------------------------------------


def tell(*words: Any) -> None:
    line = json.dumps(words).encode() + b"\n"
    assert len(line) <= select.PIPE_BUF, "it could be told in pieces"
    os.write(_pipe(), line)


@functools.cache
def _pipe() -> int:
    return os.open(os.environ["CHAOS_TOLD"], os.O_WRONLY)


def witness() -> None:
    """From now on, tell of each file in the store before it is written, put in place or removed."""
    _introduce(os.getpid())
    _watch()


@functools.cache
def _introduce(pid: int) -> None:
    tell("process", multiprocessing.current_process().name, pid)


@functools.cache
def _watch() -> None:
    """In this process, and in those that are forked from it."""
    store = os.environ["CHAOS_STORE"] + os.sep

    def watch(event: str, arguments: tuple) -> None:
        match event, arguments:
            case "open", (str(name), _, int(flags)) if flags & os.O_CREAT and _UNFINISHED.fullmatch(name):
                return tell("writing", name)  # of the folder that it is in nothing is told
            case "os.rename", (_, name, _, folder):
                what = "placing"
            case "os.remove", (name, folder):
                what = "removing"
            case _:
                return
        path = name if folder == -1 else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        if str(path).startswith(store):
            tell(what, str(path).removeprefix(store))

    sys.addaudithook(watch)


@attrs.frozen
class ToldConfig(ChainedConfig):
    """The usual names of chunks; the namespace of the stack is told."""

    type: ClassVar[str] = "told"
    opened: ClassVar[bool] = False

    def open(self, namespace: Namespace, chunk_tokens: int) -> Chained:
        if ToldConfig.opened:  # the first time it is only tried, before the tiers are open
            tell("namespace", namespace.digest.hex())
        ToldConfig.opened = True
        return super().open(namespace, chunk_tokens)


@functools.cache
def _overhear() -> None:
    """Tell of events on the owner's thread. An observer is told a moment later, when the next file may be touched."""
    pass_on = EventLog.tell

    def overheard(log: EventLog, events: Sequence[Event]) -> None:
        for event in events:
            for key in event.keys if event.tier == "disk" and event.kind in _TOLD else ():
                tell(event.kind.value, key.hex())
        pass_on(log, events)

    EventLog.tell = overheard


@hookimpl
def kvtier_token_databases():
    _overhear()
    witness()  # plugins are asked what they offer before anything is opened
    return [ToldConfig]


# -- in the engine's first process: what it is ordered ---------------------------------------------------


def live(plugin: str, orders: str, model: str, stack: dict | None, options: dict) -> None:
    sys.path.insert(0, plugin)
    witness()
    from real_engines import Engine

    engine = Engine(Path(model), stack, **options)
    tell("up")
    with open(orders) as lines:
        for line in lines:
            verb, *arguments = json.loads(line)
            _VERBS[verb](engine, *arguments)
            tell("done")


def _look(engine: Any) -> None:
    """At rest: what the tier believes to lie on the disk."""
    engine.settle()
    for key in engine.manager.tiers[0].index.resident:
        tell("indexed", key.hex())
    for key in keys_beside(engine.connector.side.namespace.digest):
        tell("memo", key.hex())
    tell("accounted", engine.manager.usage()[-1].nbytes)


def _ask(engine: Any, *numbers: int) -> None:
    answers = engine.ask(*map(asked, numbers))
    for number, answer in zip(numbers, answers, strict=True):
        tell("answer", number, answer.tokens, answer.logprobs, answer.cached)


def _serve(engine: Any, seed: str, batches: int) -> None:
    """Some prompts of the pool at a time; now and then one whose client goes away after a step or two."""
    drawn = random.Random(seed)
    for _ in range(batches):
        if drawn.random() < 0.2:
            _begin(engine, asked(drawn.randrange(POOL)), steps=drawn.randrange(1, 3))
            engine.llm.llm_engine.abort_request(["begun"])
        _ask(engine, *drawn.sample(range(POOL), drawn.randrange(1, 5)))


def _begin(engine: Any, tokens: list[int], steps: int) -> None:
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    llm.add_request("begun", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=9, detokenize=False))
    for _ in range(steps):
        llm.step()


def _die_in(engine: Any, name: str, calls: int) -> None:
    """After so many calls of this function of ``os``, a `kill -9` comes in the middle of one."""
    function, left = getattr(os, name), itertools.count(calls, -1)

    def dying(*arguments: Any, **options: Any) -> Any:
        if next(left) > 0:
            return function(*arguments, **options)
        if name == "pwritev":
            fd, (view,), offset = arguments
            function(fd, [view[: len(view) // 2 // FRAME_ALIGNMENT * FRAME_ALIGNMENT]], offset)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, name, dying)


def _close(engine: Any, seed: int) -> None:
    """When a prompt that nobody asked before is on its way down."""
    from real_engines import prompt

    _begin(engine, prompt(seed, 530), steps=1)
    tell("closing")
    engine.close()


_VERBS = {"look": _look, "ask": _ask, "serve": _serve, "die in": _die_in, "close": _close}


# -- in the test: starts them, listens, and kills -------------------------------------------------------


def make_plugin(folder: Path) -> None:
    """What an engine that has this folder in its path takes for the witness, installed."""
    plugin = folder / "chaos-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[kvtier.v1]\nwitness = chaos\n")


class Life:
    """One engine: it is started, does what it is ordered, and is killed. ``hear`` is called with all that it tells."""

    def __init__(
        self,
        fork_server: ForkServer,
        folder: Path,
        hear: Callable[..., None],
        environment: dict[str, str],
        **order: Any,
    ):
        folder.mkdir()
        told, orders, self._log = folder / "told", folder / "orders", folder / "log"
        os.mkfifo(told)
        os.mkfifo(orders)
        self._told = os.open(told, os.O_RDWR | os.O_NONBLOCK)
        self._orders = os.open(orders, os.O_RDWR)
        self._hear = hear
        self._unread = b""
        self.counts: Counter[str] = Counter()
        self.pids: set[int] = set()
        self.processes: dict[str, int] = {}  # by vLLM's names for them: pidfds
        fork_server.start(
            "chaos:live", self._log, {**environment, "CHAOS_TOLD": str(told)}, orders=str(orders), **order
        )
        self.expect("process")

    def close(self) -> None:
        for fd in [self._told, self._orders, *self.processes.values()]:
            os.close(fd)

    def order(self, verb: str, *arguments: Any) -> None:
        os.write(self._orders, json.dumps([verb, *arguments]).encode() + b"\n")

    def do(self, verb: str, *arguments: Any) -> list[tuple]:
        """Order it and wait until it is done; what was told meanwhile."""
        self.order(verb, *arguments)
        return self.expect("done")

    def expect(self, what: str, times: int = 1) -> list[tuple]:
        """What is told until this is told, so many times."""
        told = []
        for words in self.listen(HANG):
            told.append(words)
            times -= words[0] == what
            if not times:
                return told
        raise AssertionError(f"no '{what}': the engine {'hangs' if self.living() else 'ended by itself'}\n{self.log}")

    def listen(self, seconds: float, *names: str) -> Iterator[tuple]:
        """What is told, as it is told, for so long or until these processes (or the first) are dead and all heard."""
        deadline = time.monotonic() + seconds
        while True:
            living = self.living(*names)  # asked first, so that nothing of the dead is missed
            yield from self._read()
            left = deadline - time.monotonic()
            if (self.processes and not living) or left <= 0:
                return
            select.select([self._told, *living], [], [], left)

    def living(self, *names: str) -> list[int]:
        """The pidfds of those of these processes (or of the first) that are alive."""
        pidfds = [self.processes[name] for name in names or [*self.processes][:1]]
        dead, _, _ = select.select(pidfds, [], [], 0)
        return [pidfd for pidfd in pidfds if pidfd not in dead]

    def kill(self, name: str) -> None:
        assert self.living(name), f"{name} ended by itself\n{self.log}"
        signal.pidfd_send_signal(self.processes[name], signal.SIGKILL)

    @property
    def log(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-40:]) if self._log.exists() else ""

    def _read(self) -> Iterator[tuple]:
        """All that was told by now. Who stops listening after a word hears the next one next time."""
        with contextlib.suppress(BlockingIOError):
            while True:
                while b"\n" not in self._unread:
                    self._unread += os.read(self._told, 1 << 16)
                line, _, self._unread = self._unread.partition(b"\n")
                words = tuple(json.loads(line))
                self.counts[words[0]] += 1
                if words[0] == "process":
                    _, name, pid = words
                    self.pids.add(pid)
                    self.processes[name] = os.pidfd_open(pid)
                self._hear(*words)
                yield words


def arenas_of(pid: int) -> set[int]:
    """The inodes of kvtier's shared memory that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found = {int(line.split()[4]) for line in maps if "/memfd:kvtier" in line}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith("/memfd:kvtier"):
                    found.add(fd.stat().st_ino)
    return found
