"""Memory that an engine unmaps when it sleeps, as vLLM's cumem does: the address stays, what is behind it does not."""

from __future__ import annotations

import abc
import ctypes
import mmap

import torch

from kvtier_core.errors import BackendError


class Memory(abc.ABC):
    """So many bytes, mapped at first."""

    tensor: torch.Tensor  #: of bytes

    @abc.abstractmethod
    def unmap(self) -> None:
        """Give the memory back. A process that touches the address now is killed."""

    @abc.abstractmethod
    def map_elsewhere(self) -> None:
        """Map other memory at the address; its content is not what it was."""


class HostMemory(Memory):
    def __init__(self, nbytes: int):
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._nbytes)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        self._address = self.tensor.data_ptr()

    def unmap(self) -> None:
        self._replace(0)  # PROT_NONE

    def map_elsewhere(self) -> None:
        self._replace(mmap.PROT_READ | mmap.PROT_WRITE)

    def _replace(self, protection: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        mapped = self._libc.mmap(
            ctypes.c_void_p(self._address), ctypes.c_size_t(self._nbytes), protection, flags, -1, ctypes.c_long(0)
        )
        assert mapped == self._address, f"mmap: errno {ctypes.get_errno()}"


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class CudaMemory(Memory):
    """By CUDA's functions for virtual memory, which need a context: torch has made one."""

    def __init__(self, nbytes: int, device: int = 0):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        location = _Location(_DEVICE, device)
        self._properties = _Properties(_PINNED, 0, location, None, (ctypes.c_ubyte * 8)())
        self._access = _Access(location, _READ_WRITE)
        granularity = ctypes.c_size_t()
        self._must("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._nbytes = ctypes.c_size_t(-(-nbytes // granularity.value) * granularity.value)
        self._address = ctypes.c_uint64()
        nowhere, zero = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._must("cuMemAddressReserve", ctypes.byref(self._address), self._nbytes, ctypes.c_size_t(0), nowhere, zero)
        self._handle = ctypes.c_uint64()
        self.map_elsewhere()
        self.tensor = torch.as_tensor(_Bytes(self._address.value, nbytes), device=f"cuda:{device}")

    def unmap(self) -> None:
        torch.cuda.synchronize()
        self._must("cuMemUnmap", self._address, self._nbytes)
        self._must("cuMemRelease", self._handle)

    def map_elsewhere(self) -> None:
        zero = ctypes.c_uint64(0)
        self._must("cuMemCreate", ctypes.byref(self._handle), self._nbytes, ctypes.byref(self._properties), zero)
        self._must("cuMemMap", self._address, self._nbytes, ctypes.c_size_t(0), self._handle, zero)
        self._must("cuMemSetAccess", self._address, self._nbytes, ctypes.byref(self._access), ctypes.c_size_t(1))

    def _must(self, name: str, *arguments: object) -> None:
        if error := getattr(self._cuda, name)(*arguments):
            raise BackendError(f"{name}: error {error}")


class _Bytes:
    """Bytes at an address of the device, as torch imports them."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "strides": None, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
