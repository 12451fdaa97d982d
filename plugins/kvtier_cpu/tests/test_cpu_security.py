"""The arena's memory is its owner's: no other user opens it, and no program that the engine starts is handed it.

What keeps others out is not the mode: a memfd is born 0777, and nobody looks at it. It has no name but
``/proc/<pid>/fd/<fd>``, and to follow that the kernel asks who may trace the process: the same user, or root.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys

import pytest

from kvtier_cpu.config import CpuConfig
from kvtier_testing.samples import make_context

STRANGER, OTHER_STRANGER = 12345, 12346
_PR_SET_DUMPABLE = 4


@pytest.fixture
def arena():
    arena = CpuConfig(huge_pages="off").open(make_context(capacity=1 << 20))
    yield arena
    arena.close()


def paths(arena, pid):
    """All ways to the memory that /proc offers."""
    fd = json.loads(arena.handle)["fd"]
    return [f"/proc/{pid}/fd/{fd}", f"/proc/{pid}/task/{pid}/fd/{fd}"]


def become(user):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # Who has changed its user is closed even to that user, until it runs a program or says otherwise.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def refusals(paths, user=None):
    """Why a process of this user cannot open them; 0 where it can."""
    child = os.fork()
    if not child:
        # Whatever happens, the test runner's copy ends here.
        code = 255
        try:
            if user is not None:
                become(user)
            codes = {_try_to_open(path, flags) for path in paths for flags in (os.O_RDONLY, os.O_RDWR)}
            code = codes.pop() if len(codes) == 1 else 254
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _try_to_open(path, flags):
    try:
        os.close(os.open(path, flags))
    except OSError as error:
        return error.errno
    return 0


def test_the_owners_user_can_open_it(arena):
    """Or the next test would prove nothing."""
    assert refusals(paths(arena, os.getpid())) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_another_user_cannot(arena):
    assert refusals(paths(arena, os.getpid()), STRANGER) == errno.EACCES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_another_user_cannot_open_that_of_an_ordinary_user():
    """Its own other processes can."""
    ours, theirs = os.pipe()
    done, go_on = os.pipe()  # it keeps the arena open until then
    owner = os.fork()
    if not owner:
        code = 1
        try:
            become(STRANGER)
            arena = CpuConfig(huge_pages="off").open(make_context(capacity=1 << 20))
            own = refusals(paths(arena, os.getpid()))
            os.write(theirs, json.dumps([own, paths(arena, os.getpid())]).encode())
            os.read(done, 1)
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    try:
        own, ways = json.loads(os.read(ours, 1 << 12))
        other = refusals(ways, OTHER_STRANGER)
    finally:
        os.write(go_on, b".")
        assert os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1]) == 0
    assert (own, other) == (0, errno.EACCES)


def test_no_program_that_the_engine_starts_is_handed_it(arena):
    script = "import os; print(*(os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, close_fds=False, check=True)
    assert "memfd:kvtier" in os.readlink(paths(arena, os.getpid())[0])
    assert "memfd:kvtier" not in told.stdout
