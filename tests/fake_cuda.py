"""kvtier's CUDA library without a GPU: the library as it is, over the driver of cuda_driver.cpp."""

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import random
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import attrs
import pytest
from patience import wait_until

from kvtier_core.native import stamp_of
from kvtier_core.transfer.cuda.library import FILE, Library
from kvtier_core.transfer.cuda.opening import open_mover

SOURCE = Path(__file__).parents[1] / "csrc/cuda"
_CALLBACK = ctypes.CFUNCTYPE(None)


def built(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


@functools.cache
def libraries():
    """The paths of the library and of the driver. The folder is removed when Python ends."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    folder = Path(_folder().name)
    code = folder / "kernels"
    code.write_bytes(b"the driver of the tests does not read this")
    compiler = ("g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCE}")
    compiler += tuple(os.environ.get("CXXFLAGS", "").split())
    defined = {"CUDA_STAMP": stamp_of(SOURCE), "KERNELS": code, "ARCHITECTURES": "compute_80"}
    defined = [f'-DKVTIER_{name}="{value}"' for name, value in defined.items()]
    built(*compiler, "-fvisibility=hidden", *defined, *SOURCE.glob("*.cpp"), "-o", folder / FILE, "-ldl")
    drivers = (Path(__file__).with_name(f"cuda_driver{part}.cpp") for part in ("", "_for_kvikio"))
    built(*compiler, *drivers, "-o", folder / "libcuda.so.1")
    return folder / FILE, folder / "libcuda.so.1"


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="kvtier-cuda-")


class FakeCuda:
    """A driver with one device, and what torch's module for it has: streams, events, a current stream.

    ``deferred``: work lies on streams until `step` takes some of it, else it is done at once.
    """

    def __init__(self, *, deferred=False, seed=0, paths=None, streams=1 << 30):
        """``paths``: what `libraries` returned, in another process. Of streams there are so many, the engine's among
        them: who asks for more gets one that another has, as from torch's pool."""
        self.path, driver = paths or libraries()
        self.driver = str(driver)
        self.c = ctypes.CDLL(self.driver)
        self.c.fake_stream.restype = ctypes.c_void_p
        for name in ("step", "work", "longest_batch", "copies", "largest_copy", "locked_ranges", "allocations"):
            getattr(self.c, f"fake_{name}").restype = ctypes.c_uint64
        for thread in threading.enumerate():
            if thread.name == "kvtier-unlock":  # of a mover that was closed; it still calls the driver
                thread.join()
        self.c.fake_reset(deferred)
        self.rng = random.Random(seed)
        self._made, self._most = [], streams
        self._asked = itertools.count()
        self.engine = self.Stream()
        self._callbacks = []

    def device(self):
        """A device that was just opened."""
        return Library(self.path).device(0, self.driver)

    def mover(self, runtime, *, memory=None, **options):
        """A mover for the pages of a `World` and its slots, or these; with little memory to stage copies in."""
        return open_mover(
            attrs.evolve(runtime.kv_cache, device="cuda:0"),
            memory or memoryview(runtime.slots),
            runtime.layout.frame_nbytes,
            device=options.pop("device", None) or self.device(),
            engine=self,
            **{"half_nbytes": 64 << 10} | options,
        )

    @contextlib.contextmanager
    def capturing(self):
        """A graph is captured, in the mode that torch uses: what any thread does may spoil it."""
        self.c.fake_capture(1)
        yield
        self.c.fake_capture(0)
        assert not self.c.fake_spoiled(), "a call that is forbidden meanwhile has spoiled the capture"

    def fail(self, function, *, after=0, times=1 << 30, result=1):
        self.c.fake_fail(function.encode(), after, times, result)

    def lose(self):
        """The device does nothing any more, and every call has the error that it remembers."""
        self.c.fake_lose()

    def calls(self, function):
        return self.c.fake_calls(function.encode())

    def assert_all_returned(self):
        """All memory of the device was freed, and what was page-locked is unlocked, which goes on in the background."""
        assert self.c.fake_allocations() == 0
        wait_until(lambda: self.c.fake_locked_ranges() == 0, "some memory is still page-locked")

    def step(self):
        """Do the next work of any stream that may go on; False if none may."""
        return bool(self.c.fake_step(ctypes.c_uint64(self.rng.getrandbits(32))))

    def hold(self, stream):
        """Do no work of this stream; None: of all again."""
        self.c.fake_hold(ctypes.c_void_p(stream and stream.cuda_stream))

    def finish(self):
        while self.step():
            pass

    # -- torch.cuda -----------------------------------------------------------------------------------------

    def Stream(self, device=None, priority=0):
        number = next(self._asked) % self._most
        if number == len(self._made):
            self._made.append(_Stream(self, priority))
        return self._made[number]

    def Event(self):
        return _Event(self)

    def current_stream(self, device=None):
        return self.engine


class _Stream:
    def __init__(self, cuda, priority):
        self._cuda = cuda
        self.priority = priority
        self.cuda_stream = cuda.c.fake_stream()

    @property
    def work(self):
        return self._cuda.c.fake_work(ctypes.c_void_p(self.cuda_stream))

    def run(self, work):
        """Enqueue a call."""
        called = _CALLBACK(work)
        self._cuda._callbacks.append(called)
        self._cuda.c.fake_call(ctypes.c_void_p(self.cuda_stream), called)

    def wait_event(self, event):
        assert event.recorded, "nobody would wait for that"
        must(self._cuda.c.cuStreamWaitEvent(ctypes.c_void_p(self.cuda_stream), event.handle, 0))

    def synchronize(self):
        while self.work:
            assert self._cuda.step(), "streams wait for each other"


class _Event:
    def __init__(self, cuda):
        self._cuda, self.recorded = cuda, False
        self.handle = ctypes.c_void_p()
        push, pop = cuda.c.cuCtxPushCurrent_v2, cuda.c.cuCtxPopCurrent_v2
        push(None)
        cuda.c.cuEventCreate(ctypes.byref(self.handle), 0)
        pop(None)

    def record(self, stream):
        self.recorded = True
        must(self._cuda.c.cuEventRecord(self.handle, ctypes.c_void_p(stream.cuda_stream)))

    def synchronize(self):
        while (result := self._cuda.c.cuEventQuery(self.handle)) == _NOT_READY:
            assert self._cuda.step(), "the host waits for ever"
        must(result)

    def query(self):
        result = self._cuda.c.cuEventQuery(self.handle)
        return result != _NOT_READY and must(result)


_NOT_READY = 600


def must(result):
    """Raises what torch does. True if the driver has done what it was asked for."""
    if result:
        raise RuntimeError(f"CUDA error {result}")
    return True


def anonymous(nbytes):
    """Page-aligned memory."""
    return mmap.mmap(-1, nbytes)
