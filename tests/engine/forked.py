"""A process that opens a resource and forks children, which end in every way; after each one the resource must work.

python forked.py RESOURCE FOLDER [ADDRESS]: a key of `OPENERS`, a folder to use, and the address of its server
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from nodes import FRAMES, KEYS, Memory, finds, open_node
from nodes import read as read_from
from patience import HANG, wait_until
from servers.ports import free_port
from test_ranks import REPORT

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.start.startup import Engine, Identity
from kvtier_core.errors import BackendError
from kvtier_core.forks import only_here
from kvtier_core.identity.digest_cache import Entry
from kvtier_core.interfaces import Observer
from kvtier_core.storekit.folder import Folder
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.telemetry.status_server import Server as StatusServer
from kvtier_core.types import Event, EventKind, Namespace, Seconds
from kvtier_core.work.io_pool import IOPool, run_aside
from kvtier_disk.shared_account import FolderAccount
from kvtier_doctor.engines import ask
from kvtier_hosts.pages import PageStore
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.connection import connect
from kvtier_remote.memory import probe, served_tier
from kvtier_remote.protocol import Opening
from kvtier_remote.user_locks import used_by_others
from kvtier_serve.operators.http import HTTP
from kvtier_serve.server import Server
from kvtier_simulate.recording import RecordingConfig
from kvtier_testing.samples import PagedBuffer, make_context, make_frame, make_keys, make_layout

#: Closes the resource, as the core would; raises if it does not work.
Opened = tuple[Callable[[], object], Callable[[], object]]
#: Bytes of a store, and of one of which a user takes more than a frame in advance.
CAPACITY, LARGE = 1 << 24, 1 << 30
LAYOUT = make_layout((1024, 3072), 4)
PAGES = [[list(range(4))]]


def of_a_tier(tier: dict[str, Any], *more: dict[str, Any], **settings: Any):
    return load_config({"version": 1, "tiers": [tier, *more], **settings}, Registry.discover())


def opened(tier: dict[str, Any], capacity: int = 0):
    """A store tier's backend."""
    context = attrs.evolve(make_context(capacity=capacity), timeout=Seconds(20))
    return of_a_tier({"type": "heap", "capacity": "1MiB"}, tier).stores[0].config.open(context)


def refused(work: Callable[[], object]) -> None:
    try:
        work()
    except (BackendError, OSError):
        return
    raise AssertionError("somebody else can have it")


# -- the resources -----------------------------------------------------------------------------------------------


def folder_lock(folder: Path) -> Opened:
    lock = FolderLock(folder / "store")
    lock.take()
    return lock.release, lambda: refused(FolderLock(folder / "store").take)


def store(tier: dict[str, Any], locked: bool = False, used: Callable[[], int] = lambda: 0, capacity=CAPACITY) -> Opened:
    """A backend that keeps a frame and takes others; ``used`` are the bytes of a capacity that it has taken."""
    backend = opened(tier, capacity)
    key, frame = next(iter(FRAMES.items()))
    others = iter(make_keys(100)[len(FRAMES) :])

    counted = [0]

    def works() -> None:
        assert used() >= counted[-1], "what was taken in advance was given back"
        into = memoryview(bytearray(len(frame)))
        for each in key, next(others):
            backend.write([each], [memoryview(make_frame(each))])
            assert backend.read([each], [into]) == [len(frame)], "the frame is gone"
        if locked:
            refused(lambda: opened(tier, capacity))
        counted.append(used())

    return only_here(backend.close), works


def shared_store(folder: Path) -> Opened:
    account = FolderAccount(folder / "a", lambda: Folder.at(folder / "a"), longest=LARGE, timeout=HANG)
    tier = {"type": "disk", "capacity": "16MiB", "path": str(folder / "a"), "shared": True, "min_free": "0B"}
    return store(tier, used=lambda: account.count().used if (folder / "a").exists() else 0, capacity=LARGE)


def memory(folder: Path) -> Opened:
    context = make_context(layout=LAYOUT, capacity=1 << 20)
    config = of_a_tier({"type": "cpu", "capacity": "1MiB"}).arenas[0].config
    arena = config.open(context)
    buffer = PagedBuffer(LAYOUT, 4, random.Random(0))
    mover = config.attach(arena.handle, buffer.kv_cache())
    jobs = iter(range(100))

    def works() -> None:
        job = next(jobs)
        mover.store(job, PAGES, [0])
        mover.wait([job])
        assert [each.ok for each in mover.finished()] == [True]
        config.attach(arena.handle, buffer.kv_cache()).close()

    return only_here(lambda: (mover.close(), arena.close())), works


def threads(folder: Path) -> Opened:
    pool = IOPool("test", 2)

    def works() -> None:
        done: list[object] = []
        pool.submit_store(lambda: 1, done.append)
        while not done:
            pool.wait(1.0)
            pool.step()

    return lambda: pool.close(1.0), works


class Seen(Observer):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def observe(self, events):
        assert not self.closed
        self.events += events

    def close(self):
        self.closed = True


def tell(observer: Observer) -> None:
    observer.observe([Event(EventKind.STORED, "cpu", request="a")])


def observers(folder: Path) -> Opened:
    seen = Seen()
    several = Observers([("seen", seen)])

    def works() -> None:
        before = len(seen.events)
        several.tell([Event(EventKind.STORED, "cpu", request="a")])
        wait_until(lambda: len(seen.events) > before)

    return several.close, works


def metrics(where: dict[str, Any]) -> Opened:
    config = of_a_tier({"type": "heap", "capacity": "1MiB"}, observers=[{"type": "prometheus", **where}])
    observer = config.observers[0].open(make_context())

    def works() -> None:
        tell(observer)
        with socket.socket(socket.AF_UNIX if "socket" in where else socket.AF_INET) as client:
            client.settimeout(20)
            client.connect(where.get("socket") or ("127.0.0.1", where["port"]))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.0 200")

    return only_here(observer.close), works


def events(folder: Path) -> Opened:
    settings = {"type": "jsonl", "path": str(folder / "events")}
    config = of_a_tier({"type": "heap", "capacity": "1MiB"}, observers=[{**settings, "capacity": "1MiB"}]).observers[0]
    observer = config.open(attrs.evolve(make_context(), replicas=1))
    (file,) = (folder / "events").iterdir()

    def works() -> None:
        before = file.stat().st_size
        tell(observer)
        assert file.stat().st_size > before
        others = [config.open(make_context()) for _ in range(3)]  # with a file each, all that there is room for
        refused(lambda: config.open(make_context()))
        for each in others:
            each.close()
        for each in (folder / "events").iterdir():
            if each != file:
                each.unlink()

    return only_here(observer.close), works


def recording(folder: Path) -> Opened:
    observer = RecordingConfig(folder / "recorded").open(make_context())
    (file,) = (folder / "recorded").iterdir()

    def works() -> None:
        before = file.stat().st_size
        observer.observe([Event(kind, "", request="a") for kind in (EventKind.ARRIVED, EventKind.FINISHED)])
        assert file.stat().st_size > before

    return only_here(observer.close), works


def status(folder: Path) -> Opened:
    server = StatusServer(folder / "status.sock", lambda asked: {"here": True})
    return server.close, lambda: ask(folder / "status.sock", {"status": 1})


def digest(folder: Path) -> Opened:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    alone = Entry("test", ()).alone()
    alone.__enter__()

    def works() -> None:
        waiting = run_aside(lambda: Entry("test", ()).alone().__enter__(), "waits")
        waiting.join(0.3)
        assert waiting.is_alive(), "somebody else has the lock"

    return lambda: alone.__exit__(None, None, None), works


def engine(folder: Path) -> Opened:
    """Its scheduler side, with all that it opens."""
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    folder.chmod(0o700)
    port = free_port()
    disk = {"type": "disk", "capacity": "16MiB", "path": str(folder / "store")}
    config = of_a_tier(
        {"type": "cpu", "capacity": "16MiB"},
        disk,
        {"type": "peers", "listen": f"127.0.0.1:{free_port()}"},
        observers=[
            {"type": "prometheus", "port": port},
            {"type": "jsonl", "path": str(folder / "events")},
            {"type": "recording", "path": str(folder / "recorded")},
        ],
    )

    def identity(chunk_tokens, report):
        return Identity(Namespace.of({"model": "m"}), Namespace.of({}))

    side = Engine(identity, name="a", model="m", version="a host 1.2").open(config, [REPORT])

    def works() -> None:
        side.drain(1.0)
        (path,) = (folder / "kvtier").glob("status-*.sock")
        assert ask(path, {"status": 1})["pid"] == os.getpid()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG) as answer:
            assert answer.status == 200
        refused(lambda: opened(disk, CAPACITY))
        assert side.manager.reserve(make_keys(1), "x")
        side.manager.release("x")

    return side.close, works


def server(folder: Path) -> Opened:
    """`kvtier serve`, with what it keeps and an address for operators."""
    keep = folder / "kept"
    keep.mkdir(mode=0o700)
    config = of_a_tier({"type": "cpu", "capacity": "1MiB", "huge_pages": "off", "keep": str(keep)})
    path = folder / "kvtier.sock"
    server = Server(config, path)
    http = HTTP(server)
    port = http.open_port("127.0.0.1", 0)
    thread = run_aside(server.serve, "turns")
    engine = RemoteStack(path, Opening("m", "e", Namespace.of({"m": "m"}), LAYOUT), Waits(20.0, 20.0, 20.0))

    def works() -> None:
        probe(path)
        assert engine.reserve(make_keys(1), "x"), "the engine has no session any more"
        engine.release("x")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=HANG) as answer:
            assert answer.status == 200
        refused(FolderLock(keep).take)

    def close() -> None:
        engine.close()
        http.close()
        server.stop()
        thread.join()
        server.close(1.0)

    return close, works


def engine_of_a_server(folder: Path, address: str) -> Opened:
    """The scheduler side's session, and the worker's lock of the kept memory."""
    engine = RemoteStack(Path(address), Opening("m", "e", Namespace.of({"m": "m"}), LAYOUT), Waits(20.0, 20.0, 20.0))
    buffer = PagedBuffer(LAYOUT, 4, random.Random(0))
    handle = next(iter(engine.handles.values()))
    mover = served_tier(handle).config.attach(handle, buffer.kv_cache())
    leave = only_here(mover.close)
    jobs = iter(range(100))

    def works() -> None:
        slots = engine.reserve(make_keys(1), "x")
        job = next(jobs)
        mover.store(job, PAGES, [slot.index for slot in slots.values()])
        mover.wait([job])
        assert [each.ok for each in mover.finished()] == [True]
        engine.release("x")
        with open(Path(address).parent / "kept" / "memory", "r+b") as file:
            assert used_by_others(file.fileno(), 0), "the next server does not see that its memory is in use"

    return lambda: (leave(), engine.close()), works


def connection(folder: Path, address: str) -> Opened:
    ours = connect(Path(address))

    def works() -> None:
        ours.wait(0)
        try:
            list(ours.receive())
        except Exception as error:
            raise AssertionError("the connection has ended") from error

    return ours.close, works


def pages(folder: Path) -> Opened:
    tiers = {"type": "cpu", "capacity": "16MiB"}, {"type": "disk", "capacity": "16MiB", "path": str(folder / "store")}
    pages = PageStore(of_a_tier(*tiers), Namespace.of({"m": "m"}), 4096)
    names = iter(range(100))

    def works() -> None:
        pages.put([b"%d" % next(names)], [memoryview(bytearray(4096))])
        wait_until(pages.poll)

    return pages.close, works


def peers(folder: Path) -> Opened:
    shows = Memory(folder / "memory")
    node = open_node(shows)
    reads = open_node(peers=(node.address,))

    def works() -> None:
        shows.put(KEYS[0], FRAMES[KEYS[0]])
        wait_until(lambda: finds(reads, KEYS[0]))
        assert read_from(reads, KEYS[:1]) == [FRAMES[KEYS[0]]]

    return only_here(lambda: (reads.close(), node.close())), works


OPENERS: dict[str, Callable[..., Opened]] = {
    "folder lock": folder_lock,
    "disk": lambda folder: store({"type": "disk", "capacity": "16MiB", "path": str(folder / "a")}, locked=True),
    "shared disk": shared_store,
    "gds": lambda folder: store({"type": "gds", "capacity": "16MiB", "paths": [str(folder / "a")]}, locked=True),
    "redis": lambda folder, url: store({"type": "redis", "capacity": "16MiB", "url": url}),
    "s3": lambda folder, url: store({"type": "s3", "capacity": "16MiB", "bucket": "kvtier-tests", "endpoint": url}),
    "mooncake": lambda folder, address: store({"type": "mooncake", "master": address}),
    "peers": peers,
    "cpu": memory,
    "threads": threads,
    "observers": observers,
    "metrics at a port": lambda folder: metrics({"port": free_port()}),
    "metrics at a socket": lambda folder: metrics({"socket": str(folder / "metrics.sock")}),
    "events": events,
    "recording": recording,
    "status": status,
    "lock of a digest": digest,
    "engine": engine,
    "server": server,
    "engine of a server": engine_of_a_server,
    "connection to a server": connection,
    "pages of a host": pages,
}


# -- how a child ends --------------------------------------------------------------------------------------------


def unwinds(close: Callable[[], object]) -> None:
    """Through the blocks in which its parent has opened it."""
    try:
        sys.exit()
    finally:
        close()


def ends(close: Callable[[], object]) -> None:
    """The interpreter calls what was registered for its exit, and collects what is left."""
    sys.exit()


if __name__ == "__main__":
    close, works = OPENERS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    works()
    for end in unwinds, ends:
        child = os.fork()
        if not child:
            signal.alarm(int(HANG))
            end(close)
        assert (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == 0, f"a child that {end.__name__}: {code}"
        time.sleep(0.1)  # for what notices a moment later
        works()
    for target in close, time.time:
        process = multiprocessing.get_context("fork").Process(target=target, daemon=True)
        process.start()
        process.join(HANG)
        assert process.exitcode == 0, f"a child of multiprocessing: {process.exitcode}"
        works()
    close()
    print("closed")
