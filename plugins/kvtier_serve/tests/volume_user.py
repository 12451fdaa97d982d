"""Uses a volume as everything of kvtier does that keeps files; run in a process of a pod (tests/pods.py)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from served import config_of

from kvtier_core.engine.messages import WorkerReport
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.identity import digest_cache
from kvtier_core.interfaces import Backend
from kvtier_core.storekit import user_folders
from kvtier_core.telemetry.status_server import Server as StatusServer
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_gds.config import GdsConfig
from kvtier_remote.connection import connect
from kvtier_serve.server import Server
from kvtier_testing.samples import make_context, make_frame, make_key
from kvtier_vllm import worker_reports

KEY = make_key(0)
NBYTES = 4 * FRAME_ALIGNMENT
FRAME = make_frame(KEY, nbytes=NBYTES)


def disk(path: Path) -> str:
    return _stored(DiskConfig(path=path, min_free=Nbytes(0)).open(make_context()))


def shared(path: Path) -> str:
    return _stored(DiskConfig(path=path, shared=True, min_free=Nbytes(0)).open(make_context()))


def gds(path: Path) -> str:
    return _stored(GdsConfig(paths=(path,)).open(make_context(capacity=16 * NBYTES)))


def _stored(store: Backend) -> str:
    """Store a frame, if it is not there from before."""
    try:
        before = _read(store)
        store.write([KEY], [FRAME])
        assert _read(store) == FRAME
        return "found" if before == FRAME else "new"
    finally:
        store.close()


def _read(store: Backend) -> bytes:
    into = memoryview(bytearray(NBYTES))
    (count,) = store.read([KEY], [into])
    return bytes(into[:count]) if isinstance(count, int) else b""


def keep(path: Path) -> str:
    """A server's kept memory."""
    server = Server(config_of(16, keep=path), Path(tempfile.mkdtemp()) / "kvtier.sock")
    try:
        return "found" if server.spaces.memories[0].journal.spaces else "new"
    finally:
        server.close(5.0)


def sockets(path: Path) -> str:
    """Those of a server and of an engine's status."""
    server = Server(config_of(16), path / "kvtier.sock")
    try:
        connect(path / "kvtier.sock").close()
        StatusServer(path / "status.sock", lambda asked: {}).close()
    finally:
        server.close(5.0)
    return "new"


def caches(path: Path) -> str:
    """Digests of weights, with the volume as the home, and reports of workers in its ``/tmp``."""
    os.environ["XDG_CACHE_HOME"] = tempfile.tempdir = str(path)
    entry = digest_cache.Entry("weights", (("file", 1),))
    before = entry.recall()
    with entry.alone():
        entry.remember("0" * 64)
    assert entry.recall() == "0" * 64
    report = WorkerReport("cpu", (), ())
    worker_reports.leave("engine", 0, report)
    assert user_folders.runtime_folder().parent == path
    assert worker_reports.collect("engine", 1) == [report]
    worker_reports.remove("engine", 1)
    tempfile.tempdir = None
    return "found" if before else "new"


KINDS: tuple[Callable[[Path], str], ...] = (disk, shared, gds, keep, sockets, caches)


def use(path: str, *kinds: str, apart: bool = True) -> None:
    """Print what became of each kind, as JSON; ``apart``: each has a folder of its own in ``path``."""
    outcomes = {}
    for kind in KINDS:
        name = kind.__name__
        if name in kinds or not kinds:
            try:
                outcomes[name] = kind(Path(path) / name if apart else Path(path))
            except (BackendError, ConfigError, OSError) as error:
                outcomes[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(outcomes))
