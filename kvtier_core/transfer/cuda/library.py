"""``libkvtier_cuda``: plain C, loaded when a GPU is to be served and not before. It may not be there."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import kvtier_core
from kvtier_core.errors import BackendError
from kvtier_core.transfer.page_lists import Layer

FILE = "libkvtier_cuda.so"

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
_ARGUMENTS = {
    "kvtier_cuda_devices": (ctypes.POINTER(_INT),),
    "kvtier_cuda_error": (_INT,),
    "kvtier_cuda_open": (_INT, _POINTER, _U32, _U64, _U64, ctypes.POINTER(_POINTER)),
    "kvtier_cuda_close": (_POINTER,),
    "kvtier_cuda_kernel": (_POINTER, _INT, _POINTER, _U32, _POINTER),
    "kvtier_cuda_dma": (_POINTER, _INT, _POINTER, _U32, _POINTER, ctypes.POINTER(_INT)),
}


class Library:
    """Raises OSError if it cannot be loaded; afterwards BackendError with what CUDA says."""

    def __init__(self, path: Path):
        self.c = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self.c, name)
            function.argtypes, function.restype = arguments, _INT
        self.c.kvtier_cuda_error.restype = ctypes.c_char_p
        self.c.kvtier_cuda_close.restype = None

    def devices(self) -> int:
        count = _INT()
        self.must(self.c.kvtier_cuda_devices(ctypes.byref(count)))
        return count.value

    def open(self, device: int, layers: Sequence[Layer], shards: int, slot_nbytes: int) -> NativePages:
        return NativePages(self, device, layers, shards, slot_nbytes)

    def must(self, error: int) -> None:
        if error:
            raise BackendError(f"CUDA: {self.c.kvtier_cuda_error(error).decode()} ({error})", retryable=False)


class NativePages:
    """Layers whose pages are copied by one method or the other.

    ``pieces`` is the address of ``count`` triples of int32: block, slot, place. It is read before a call returns.
    """

    def __init__(self, library: Library, device: int, layers: Sequence[Layer], shards: int, slot_nbytes: int):
        self._library = library
        self._handle = _POINTER()
        self.batched = True  #: may the copy engines be given many copies at once? Known after the first
        flat = (_U64 * (4 * len(layers)))(*(number for layer in layers for number in layer))
        library.must(
            library.c.kvtier_cuda_open(device, flat, len(layers), shards, slot_nbytes, ctypes.byref(self._handle))
        )

    def kernel(self, to_slots: bool, pieces: int, count: int, stream: int) -> None:
        self._library.must(self._library.c.kvtier_cuda_kernel(self._handle, to_slots, pieces, count, stream))

    def dma(self, to_slots: bool, pieces: int, count: int, stream: int) -> None:
        batched = _INT(self.batched)
        self._library.must(
            self._library.c.kvtier_cuda_dma(self._handle, to_slots, pieces, count, stream, ctypes.byref(batched))
        )
        self.batched = bool(batched.value)

    def close(self) -> None:
        """May be called twice."""
        self._library.c.kvtier_cuda_close(self._handle)
        self._handle = _POINTER()


@functools.cache
def load() -> Library | str:
    """The library if it finds a device, else why not."""
    path = next((each for folder in kvtier_core.__path__ if (each := Path(folder) / FILE).exists()), None)
    if path is None:
        return f"{FILE} was not built"
    try:
        library = Library(path)
        return library if library.devices() else "CUDA: no device"
    except (OSError, BackendError) as error:
        return str(error)
