"""Reads slabs straight into the memory of a GPU (GPUDirect Storage), with KvikIO, which a user installs separately."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvtier_core.errors import BackendError
from kvtier_core.work.io_pool import Outcome, run
from kvtier_gds.slab import Extent

#: Reads that KvikIO has under way at a time, unless the environment says otherwise.
_THREADS, _THREADS_VARIABLE = 8, "KVIKIO_NTHREADS"
_CUFILE = "libcufile.so.0"  #: which KvikIO has loaded
_P2P_SUPPORTED = 1 << 4  # CU_FILE_P2P_SUPPORTED
#: Where NVIDIA's kernel modules show that they are loaded.
_MODULES = Path("/proc/driver")


def gpudirect(modules: Path = _MODULES) -> str:
    """Can files be read into a GPU here? Answers in plain words, as far as possible without asking its driver."""
    if not (modules / "nvidia/version").exists():
        return "no: no NVIDIA GPU is here"
    if importlib.util.find_spec("kvikio") is None:
        return "no: KvikIO is not installed"
    if not (modules / "nvidia-fs/version").exists():
        return "perhaps: the kernel module nvidia-fs is not loaded, and each worker tries PCI P2PDMA"
    return "perhaps: each worker tries it"


class DeviceMemory(NamedTuple):
    """Memory of a GPU, of this process."""

    ordinal: int  #: of the GPU in this process
    address: int
    nbytes: int

    def part(self, at: int, nbytes: int) -> DeviceMemory:
        """``nbytes`` bytes of it, from its byte ``at`` on."""
        return self._replace(address=self.address + at, nbytes=nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The form that libraries for arrays on GPUs ask for."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class DeviceReads:
    """Files that are open for reads into ``memory``."""

    def __init__(self, fds: Sequence[int], memory: DeviceMemory, *, must_be_direct: bool = True):
        """``must_be_direct``: reads must not pass through the host's memory.

        Raises BackendError if that is impossible. May hang where the driver is broken.
        """
        kvikio = _kvikio()
        if _THREADS_VARIABLE not in os.environ:
            kvikio.defaults.set("num_threads", _THREADS)
        with contextlib.ExitStack() as closing, contextlib.ExitStack() as opening:
            if must_be_direct:
                _open_driver(kvikio, closing)
                # Otherwise, if cuFile refuses a file, KvikIO silently reads it through the host's memory.
                opening.enter_context(kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF))
            kvikio.buffer.memory_register(memory)
            closing.callback(kvikio.buffer.memory_deregister, memory)
            # KvikIO opens files by path: this is the path of the very file that is open.
            self._files = [closing.enter_context(kvikio.CuFile(f"/proc/self/fd/{fd}")) for fd in fds]
            self._closing = closing.pop_all()

    def read(self, extents: Sequence[Extent], into: Sequence[DeviceMemory]) -> list[Outcome]:
        """Read each extent into the memory with the same number. Each value is the number of bytes read."""
        begun = [run(partial(self._begin, *each)) for each in zip(extents, into, strict=True)]
        # Wait for all of them: a read that is left alone would still write.
        return [each if each.error else run(each.value) for each in begun]

    def close(self) -> None:
        """Close the files and release the memory. May be called twice; no read is under way."""
        self._closing.close()

    def _begin(self, extent: Extent, into: DeviceMemory) -> Any:
        """Begin to read. Returns a function that waits for the end."""
        if not extent.nbytes:
            return lambda: 0
        return self._files[extent.slab].pread(into, extent.nbytes, extent.at).get


def _open_driver(kvikio: Any, closing: contextlib.ExitStack) -> None:
    """Raises BackendError if cuFile cannot read straight into a GPU.

    Before its driver is open, cuFile answers that there is no nvidia-fs, and KvikIO remembers the first answer.
    """
    # Otherwise cuFile itself would read through the host's memory what it cannot read directly.
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "false")
    try:
        kvikio.cufile_driver.driver_open()
    except Exception as error:
        raise BackendError(f"GPUDirect Storage is not available: cannot open cuFile: {error}") from error
    closing.callback(kvikio.cufile_driver.driver_close)
    if not kvikio.cufile_driver.get("is_gds_available") and not _supports_p2pdma():
        why = "cuFile finds no nvidia-fs and no PCI P2PDMA"
        raise BackendError(f"GPUDirect Storage is not available: {why}; see `kvtier doctor`")


def _supports_p2pdma() -> bool:
    """Can cuFile, whose driver is open, do without nvidia-fs? KvikIO does not report it."""
    properties = _Properties()
    try:
        failed = ctypes.CDLL(_CUFILE).cuFileDriverGetProperties(ctypes.byref(properties))
    except (OSError, AttributeError):
        return False
    return not failed and bool(properties.features & _P2P_SUPPORTED)


class _Properties(ctypes.Structure):
    """CUfileDrvProps_t of cufile.h, up to what is read here; later versions may add to its end."""

    _fields_: ClassVar = [
        ("nvfs_version", ctypes.c_uint * 2),
        ("nvfs_sizes", ctypes.c_size_t * 2),
        ("nvfs_flags", ctypes.c_uint * 2),
        ("features", ctypes.c_uint),
        ("rest", ctypes.c_uint * 64),
    ]


def _kvikio() -> Any:
    try:
        import kvikio
        import kvikio.buffer
        import kvikio.cufile_driver
        import kvikio.defaults
    except Exception as error:  # also from a library that it loads
        raise BackendError(
            f"KvikIO is not installed: {error}; see the README of kvtier-gds for its installation"
        ) from error
    return kvikio
