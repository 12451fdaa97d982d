"""Loads ``libkvtier_cuda``, a plain C interface, when the first GPU is served. It may not have been built."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import kvtier_core
from kvtier_core.errors import BackendError

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
    """The library of this path, loaded. Raises OSError if it cannot be; every method raises BackendError.

    Each method is called on the thread that enqueues the engine's work.
    """

    def __init__(self, path: Path):
        self.c = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self.c, name)
            function.argtypes, function.restype = arguments, _INT
        self.c.kvtier_cuda_error.restype = ctypes.c_char_p
        self.c.kvtier_cuda_close.restype = None

    def devices(self) -> int:
        """How many CUDA devices there are."""
        count = _INT()
        self.must(self.c.kvtier_cuda_devices(ctypes.byref(count)))
        return count.value

    def open(self, device: int, layers: Sequence[Sequence[int]], shards: int, slot_nbytes: int) -> NativePages:
        """The pages of these layers of one group, ready to be copied; see `NativePages`."""
        return NativePages(self, device, layers, shards, slot_nbytes)

    def must(self, error: int) -> None:
        """Raises BackendError unless ``error`` is cudaSuccess."""
        if error:
            raise BackendError(f"CUDA: {self.c.kvtier_cuda_error(error).decode()} ({error})")


class NativePages:
    """Layers of one group, whose pages are copied by kernel or by copy engine.

    ``layers`` begin with the four numbers of `csrc/cuda/pages.h`: base, stride, nbytes, offset. ``shards`` is the
    address of this rank's shard in slot 0. ``pieces`` is the address of ``count`` triples of int32: block, slot and
    place in the chunk; it is read before a call returns.
    """

    def __init__(self, library: Library, device: int, layers: Sequence[Sequence[int]], shards: int, slot_nbytes: int):
        self._library = library
        self._handle = _POINTER()
        self.batched = True  #: does the driver take many copies in one call? Known after the first
        flat = (_U64 * (4 * len(layers)))(*(number for layer in layers for number in layer[:4]))
        library.must(
            library.c.kvtier_cuda_open(device, flat, len(layers), shards, slot_nbytes, ctypes.byref(self._handle))
        )

    def kernel(self, to_slots: bool, pieces: int, count: int, stream: int) -> None:
        """Enqueue one kernel for all pieces, or a few. Raises BackendError if the device cannot reach host memory."""
        self._library.must(self._library.c.kvtier_cuda_kernel(self._handle, to_slots, pieces, count, stream))

    def dma(self, to_slots: bool, pieces: int, count: int, stream: int) -> None:
        """Enqueue copies by the device's copy engines."""
        batched = _INT(self.batched)
        self._library.must(
            self._library.c.kvtier_cuda_dma(self._handle, to_slots, pieces, count, stream, ctypes.byref(batched))
        )
        self.batched = bool(batched.value)

    def close(self) -> None:
        """Free what the library holds for these pages. May be called twice."""
        self._library.c.kvtier_cuda_close(self._handle)
        self._handle = _POINTER()


@functools.cache
def load() -> Library | str:
    """The library if it finds a device, else why it is not used."""
    path = next((each for folder in kvtier_core.__path__ if (each := Path(folder) / FILE).exists()), None)
    if path is None:
        return f"{FILE} was not built"
    try:
        library = Library(path)
        return library if library.devices() else "CUDA: no device"
    except (OSError, BackendError) as error:
        return str(error)
