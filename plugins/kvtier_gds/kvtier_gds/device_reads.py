"""Reads slabs straight into the memory of a GPU (GPUDirect Storage), by KvikIO, which a user installs beside this."""

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
from kvtier_core.transfer.io_pool import Outcome, run
from kvtier_gds.slab import Extent

#: Reads that KvikIO has under way at a time, unless the environment says otherwise.
_THREADS, _THREADS_VARIABLE = 8, "KVIKIO_NTHREADS"
_CUFILE = "libcufile.so.0"  #: which KvikIO has loaded
_P2P_SUPPORTED = 1 << 4  # CU_FILE_P2P_SUPPORTED
#: Where kernel modules of NVIDIA's say that they are loaded.
_MODULES = Path("/proc/driver")


def gpudirect(modules: Path = _MODULES) -> str:
    """Can files be read into a GPU here? In plain words, as far as that can be said without asking its driver."""
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
        """So many bytes of it, from its byte ``at`` on."""
        return self._replace(address=self.address + at, nbytes=nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """As libraries for arrays on GPUs ask for it."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class DeviceReads:
    """Files that are open for reads into ``memory``."""

    def __init__(self, fds: Sequence[int], memory: DeviceMemory, *, must_be_direct: bool = True):
        """``must_be_direct``: reads must not pass through the host's memory.

        Raises BackendError if that cannot be. May hang where the driver is broken.
        """
        kvikio = _kvikio()
        if _THREADS_VARIABLE not in os.environ:
            kvikio.defaults.set("num_threads", _THREADS)
        with contextlib.ExitStack() as closing, contextlib.ExitStack() as opening:
            if must_be_direct:
                _open_driver(kvikio, closing)
                # Else KvikIO reads a file through the host's memory if cuFile refuses it, and nobody hears.
                opening.enter_context(kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF))
            kvikio.buffer.memory_register(memory)
            closing.callback(kvikio.buffer.memory_deregister, memory)
            # KvikIO opens files by path: this is the path of the very file that is open.
            self._files = [closing.enter_context(kvikio.CuFile(f"/proc/self/fd/{fd}")) for fd in fds]
            self._closing = closing.pop_all()

    def read(self, extents: Sequence[Extent], into: Sequence[DeviceMemory]) -> list[Outcome]:
        """Read each extent into the memory with the same number. The values are the bytes that were read."""
        begun = [run(partial(self._begin, *each)) for each in zip(extents, into, strict=True)]
        # All are waited for: what is left alone would still write.
        return [each if each.error else run(each.value) for each in begun]

    def close(self) -> None:
        """Close the files and leave the memory. May be called twice; no read is under way."""
        self._closing.close()

    def _begin(self, extent: Extent, into: DeviceMemory) -> Any:
        """Begin to read. What is returned waits for the end."""
        if not extent.nbytes:
            return lambda: 0
        return self._files[extent.slab].pread(into, extent.nbytes, extent.at).get


def _open_driver(kvikio: Any, closing: contextlib.ExitStack) -> None:
    """Raises BackendError if cuFile cannot read straight into a GPU.

    Before its driver is open cuFile answers that no nvidia-fs is there, and KvikIO remembers what it was told first.
    """
    # Else cuFile itself would read through the host's memory what it cannot read otherwise.
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "false")
    try:
        kvikio.cufile_driver.driver_open()
    except Exception as error:
        raise BackendError(f"GPUDirect Storage is not available: cuFile cannot be opened: {error}") from error
    closing.callback(kvikio.cufile_driver.driver_close)
    if not kvikio.cufile_driver.get("is_gds_available") and not _supports_p2pdma():
        why = "cuFile finds no nvidia-fs and no PCI P2PDMA"
        raise BackendError(f"GPUDirect Storage is not available: {why}; see `kvtier doctor`")


def _supports_p2pdma() -> bool:
    """Can cuFile, whose driver is open, do without nvidia-fs? KvikIO does not tell."""
    properties = _Properties()
    try:
        failed = ctypes.CDLL(_CUFILE).cuFileDriverGetProperties(ctypes.byref(properties))
    except (OSError, AttributeError):
        return False
    return not failed and bool(properties.features & _P2P_SUPPORTED)


class _Properties(ctypes.Structure):
    """CUfileDrvProps_t of cufile.h, up to what is read here; versions to come may add to its end."""

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
    except Exception as error:  # of a library that it loads, too
        raise BackendError(
            f"KvikIO is not installed: {error}; the README of kvtier-gds says how to install it"
        ) from error
    return kvikio
