"""A process that was forked closes nothing of its parent's, however it ends."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from forked import OPENERS
from patience import HANG
from servers.kvtier import kvtier_serve
from servers.mooncake import ROOM, one_master
from servers.redis import one_server
from servers.s3 import ENVIRONMENT, s3_server  # noqa: F401 - a fixture
from sizes import every_third
from test_layers import ALL_MODULES

#: Calls that act on what a fork shares with its parent.
UNDOES = {"unlink", "rmtree", "rmdir", "shutdown", "kill", "terminate", "unregister", "TemporaryDirectory"}
UNDOES |= {"LOCK_UN", "F_UNLCK"}
#: The classes that plugins implement: the core closes what it has opened, each with `only_here` or in a ProcessBound.
CLOSED_BY_THE_CORE = {"AllocatorBackend", "Backend", "DirectReader", "Mover", "Observer"}
#: Functions that make such calls, and are methods of neither.
KNOWN = {
    "kvtier_doctor.bench": "a command, which forks nobody",
    "kvtier_blend.quality.command": "a command, whose engine spawns its processes",
    "kvtier_blend.quality.scoring": "the engine of a command",
    "kvtier_vllm.quality.command": "a command, whose engine spawns its processes",
    "kvtier_observers.endpoint._Server": "closed by an Endpoint, an Observer",
    "kvtier_remote.guarded_memory.GuardedMemory": "a mapping is each process's own",
    "kvtier_remote.user_locks": "called by a ServedMover",
    "kvtier_core.storekit.folder_lock": "removes a folder that a command has made",
    "kvtier_core.storekit.folder_lock._Locked": "a descriptor is each process's own",
    "kvtier_core.storekit.folder.Folder": "removes what its caller names; a descriptor is each process's own",
    "kvtier_core.storekit.trial": "removes a file that it has just made",
    "kvtier_core.storekit.owner_socket": "removes sockets on which no process listens",
    "kvtier_serve.programs._Program": "ends what its own thread has started, and a fork has none of its threads",
    "kvtier_vllm.metrics": "a registry in this process's memory",
    "kvtier_vllm.quality.scoring": "the engine of a command",
    "kvtier_vllm.worker_reports": "removes reports by their names, when they have been read or are old",
    "kvtier_gds.slab": "removes a store that a command has made",
    "kvtier_mooncake.client._Process": "closed by a Backend",
    "kvtier_peers.link.Link": "closed by a Backend",
    "kvtier_peers.listener.Listener": "closed by a Backend",
}


@contextlib.contextmanager
def address_for(what, folder, request):
    """The address of the server that it needs, in a list."""
    with contextlib.ExitStack() as closing:
        if what == "redis":
            yield [closing.enter_context(one_server(folder / "redis")).url]
        elif what == "s3":
            yield [request.getfixturevalue("s3_server").url]
        elif what == "mooncake":
            master = closing.enter_context(one_master(folder / "mooncake"))
            closing.enter_context(master.owner(ROOM))
            yield [master.address]
        elif what in ("engine of a server", "connection to a server"):
            yield [closing.enter_context(kept_server(folder))]
        else:
            yield []


@contextlib.contextmanager
def kept_server(folder):
    """`kvtier serve` whose memory is a file; the path of its socket."""
    (folder / "kept").mkdir(mode=0o700)
    tier = f"{{type: cpu, capacity: 1MiB, huge_pages: 'off', keep: {folder / 'kept'}}}"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n  - {tier}\n")
    with kvtier_serve(folder / "kvtier.yaml", folder / "kvtier.sock"):
        yield folder / "kvtier.sock"


@pytest.fixture
def folder():
    """In memory, where memory can be kept, and with a path that is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="forks-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", every_third(list(OPENERS)))
def test_a_forked_child_closes_nothing_of_its_parents(what, folder, request):
    with address_for(what, folder, request) as address:
        parent = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forked.py"), what, folder, *address],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = parent.communicate(timeout=HANG)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
        assert parent.returncode == 0, err
        assert out.endswith("closed\n")


#: Of process 1 of a PID namespace: it holds a lock, and forks process 1 of another namespace, which closes the lock.
PROCESS_1 = """
import ctypes, os, sys
from pathlib import Path
from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
lock.take()
assert ctypes.CDLL(None).unshare(0x20000000) == 0, "cannot unshare"
if not (child := os.fork()):
    lock.release()
    os._exit(0 if os.getpid() == 1 else 3)
assert os.getpid() == 1 and os.waitpid(child, 0)[1] == 0
try:
    FolderLock(Path(sys.argv[1])).take()
except BackendError:
    print("locked")
"""


def test_a_child_with_the_number_of_its_parent_closes_nothing(folder):
    namespace = ("unshare", "--user", "--map-root-user", "--pid", "--fork")
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make a PID namespace here")
    command = [*namespace, sys.executable, "-c", PROCESS_1, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.stdout == "locked\n", done.stderr


def undoing():
    """Where the sources undo something: a class with its bases, or a module."""
    for module, file in ALL_MODULES.items():
        if not module.startswith(("kvtier_testing", "kvtier_example")):
            for node in ast.parse(file.read_text()).body:
                called = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                made = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.alias)}
                if called & UNDOES or made & {"__del__", "atexit"}:
                    yield f"{module}.{node.name}" if isinstance(node, ast.ClassDef) else module


def process_bound():
    """The classes that a fork does not close, by their full names."""
    classes = [
        (f"{module}.{node.name}", node.name, {getattr(base, "id", "") for base in node.bases})
        for module, file in ALL_MODULES.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    bound, known = {"ProcessBound", *CLOSED_BY_THE_CORE}, set()
    while found := {full for full, name, bases in classes if bases & bound} - known:
        known |= found
        bound |= {full.rpartition(".")[2] for full in found}
    return known


def test_whatever_undoes_something_shared_is_bound_to_its_process_or_known():
    unbound = set(undoing()) - process_bound()
    assert unbound - KNOWN.keys() == set(), "derive these from ProcessBound, or say why they need it not"
    assert KNOWN.keys() - unbound == set(), "these undo nothing any more"
