"""Loads ``libkvtier_cuda``, a plain C interface, when the first GPU is used. It may not have been built."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs

import kvtier_core
from kvtier_core.errors import BackendError
from kvtier_core.native import expected_stamp
from kvtier_core.transfer.page_lists import Layer

FILE = "libkvtier_cuda.so"
#: The driver, found as the engine's CUDA runtime finds it.
DRIVER = "libcuda.so.1"

logger = logging.getLogger("kvtier")

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
#: Functions that return text.
_TEXTS = ("stamp", "problem", "architectures", "no_kernels")
_OUT, _INT_OUT = ctypes.POINTER(_POINTER), ctypes.POINTER(_INT)
_ARGUMENTS = {
    "kvtier_cuda_stamp": (),
    "kvtier_cuda_problem": (),
    "kvtier_cuda_architectures": (),
    "kvtier_cuda_open": (ctypes.c_char_p, _INT, _OUT),
    "kvtier_cuda_abilities": (_POINTER, _INT_OUT, _INT_OUT, _INT_OUT),
    "kvtier_cuda_no_kernels": (_POINTER,),
    "kvtier_cuda_lock": (_POINTER, _U64, _U64),
    "kvtier_cuda_unlock": (_POINTER, _U64),
    "kvtier_cuda_allocate": (_POINTER, _U64, ctypes.POINTER(_U64)),
    "kvtier_cuda_free": (_POINTER, _U64),
    "kvtier_cuda_stage": (_POINTER, _U64, _OUT),
    "kvtier_cuda_unstage": (_POINTER, _POINTER),
    "kvtier_cuda_part": (_POINTER, _POINTER, _U32, _U64, _U64, _U64, _U64, _U64, _OUT),
    "kvtier_cuda_close_part": (_POINTER, _POINTER),
    "kvtier_cuda_can": (_POINTER, _POINTER, _INT, _INT, _POINTER),
    "kvtier_cuda_copy": (
        *(_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER),
        *(_U32, _U32, _POINTER, _POINTER, _POINTER, _U64, _U64),
    ),
    "kvtier_cuda_checksums": (_POINTER, _U64, _U64, _U64, _U32, _U64, _U64, _POINTER),
}


class Method(enum.IntEnum):
    """The ways to make the copies of a job. The numbers are those of csrc/cuda/kvtier_cuda.h."""

    DIRECT = 0  #: copy engines, page by page
    STAGED = 1  #: a kernel between pages and a buffer on the device, copy engines between the buffer and the slots
    KERNEL = 2  #: a kernel between pages and slots; loads only, unless the slots are on the device

    def __str__(self) -> str:
        return self.name.lower()


class Abilities(NamedTuple):
    """The abilities of a device, its driver and the build of the library."""

    kernels: bool  #: does the library have code for this device? If not, see `Device.no_kernels`
    reaches_host: bool  #: can a kernel use the addresses of page-locked memory?
    batches: bool  #: can one call enqueue many copies?


@attrs.frozen
class Sums:
    """Places for a job's checksums and flags, of four bytes each: on the device, and page-locked on the host."""

    on_device: int  #: address
    told: int  #: address
    count: int

    def read(self) -> tuple[int, ...]:
        """The values, once the stream has computed them."""
        return tuple((_U32 * self.count).from_address(self.told))


class Library:
    """The loaded library. The constructor, and every method that fails, raises BackendError."""

    def __init__(self, path: Path):
        try:
            self.c = ctypes.CDLL(str(path))
            for name, arguments in _ARGUMENTS.items():
                function = getattr(self.c, name)
                function.argtypes, function.restype = arguments, _INT
        except (OSError, AttributeError) as error:
            raise BackendError(f"cannot load {path.name}: {error}; reinstall kvtier") from error
        self._devices: dict[tuple[int, str], Device] = {}
        for name in _TEXTS:
            getattr(self.c, f"kvtier_cuda_{name}").restype = ctypes.c_char_p
        # Functions of other sources may take other arguments.
        if self.c.kvtier_cuda_stamp().decode() != expected_stamp("libkvtier_cuda", "cuda"):
            raise BackendError(f"{path.name} was built from different sources; reinstall kvtier")
        for name in ("abilities", "unstage", "close_part"):
            getattr(self.c, f"kvtier_cuda_{name}").restype = None

    def device(self, number: int, driver: str = DRIVER) -> Device:
        """The device with this number, through the driver library with this name or path.

        All callers share it, and it lives as long as this library: its context is the engine's.
        """
        if (number, driver) not in self._devices:
            self._devices[number, driver] = Device(self, number, driver)
        return self._devices[number, driver]

    def must(self, done: int) -> None:
        """Raise BackendError unless a call was ``done``."""
        if not done:
            raise BackendError(self.c.kvtier_cuda_problem().decode())


class Device:
    """One CUDA device.

    All methods but `lock`, `unlock` and `checksums` are called on the thread that enqueues the engine's work.
    """

    def __init__(self, library: Library, number: int, driver: str):
        self._library, self._c = library, library.c
        self.handle = _POINTER()
        library.must(self._c.kvtier_cuda_open(driver.encode(), number, ctypes.byref(self.handle)))
        self._batches = self.abilities.batches

    @property
    def abilities(self) -> Abilities:
        """The current abilities: a driver that rejects a batch of copies receives no more of them."""
        flags = [_INT() for _ in Abilities._fields]
        self._c.kvtier_cuda_abilities(self.handle, *map(ctypes.byref, flags))
        return Abilities(*(bool(flag.value) for flag in flags))

    def watch_batches(self) -> None:
        """Log once that the driver has rejected a batch of copies."""
        if self._batches and not self.abilities.batches:
            self._batches = False
            logger.warning(
                "kvtier: the CUDA driver rejected a call with many copies; from now on each has its own call"
            )

    @property
    def no_kernels(self) -> str:
        """Why kernels cannot be used; empty if they can."""
        return bytes.decode(self._c.kvtier_cuda_no_kernels(self.handle))

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock memory. Any thread may call."""
        self._library.must(self._c.kvtier_cuda_lock(self.handle, address, nbytes))

    def unlock(self, address: int) -> None:
        """Undo `lock` of this address. Any thread may call."""
        self._library.must(self._c.kvtier_cuda_unlock(self.handle, address))

    def allocate(self, nbytes: int) -> int:
        """The address of new memory on the device."""
        address = _U64()
        self._library.must(self._c.kvtier_cuda_allocate(self.handle, nbytes, ctypes.byref(address)))
        return address.value

    def free(self, address: int) -> None:
        """Free memory of `allocate`."""
        self._library.must(self._c.kvtier_cuda_free(self.handle, address))

    def staging(self, half_nbytes: int) -> Staging:
        """Memory in two halves, to stage the copies of one direction in."""
        return Staging(self._library, self, half_nbytes)

    def checksums(self, address: int, nbytes: int, sums: Sums, stream: Any, stride: int = 0) -> None:
        """Enqueue the CRC-32 of zlib over ``nbytes`` at ``address``, at ``address + stride``, and so on.

        There is one range for each place in ``sums``.

        `Sums.read` returns them after ``stream`` has computed them. Any thread may call.
        """
        ranges = address, stride, nbytes, sums.count
        places = sums.on_device, sums.told, stream.cuda_stream
        self._library.must(self._c.kvtier_cuda_checksums(self.handle, *ranges, *places))

    def part(
        self, layers: Sequence[Layer], shards: int, slot_nbytes: int, locked: int, stride: int, packed_nbytes: int = 0
    ) -> NativePart:
        """The pages of one part of a chunk, see `NativePart`."""
        return NativePart(self._library, self, layers, (shards, slot_nbytes, locked, stride, packed_nbytes))


class Staging:
    """Device memory in two halves, through which pages are copied. Always used with the same two streams."""

    def __init__(self, library: Library, device: Device, half_nbytes: int):
        self._c, self._device = library.c, device
        self.half_nbytes = half_nbytes
        self.handle = _POINTER()
        library.must(library.c.kvtier_cuda_stage(device.handle, half_nbytes, ctypes.byref(self.handle)))

    def close(self) -> None:
        """Free the memory. Called after all copies have ended; may be called twice."""
        if self.handle:
            self._c.kvtier_cuda_unstage(self._device.handle, self.handle)
        self.handle = _POINTER()


@attrs.frozen
class Direction:
    """The resources for copies in one direction: two streams, and optionally memory on the device."""

    kernels: Any  #: a torch stream for all access to pages
    bus: Any  #: another stream for all access to slots
    staging: Staging | None = None


def new_stream(engine: Any, device: Any) -> Any:
    """A new stream of torch's module ``engine``. Its kernels precede those that the engine has enqueued already.

    At the same priority they may have to wait until a whole CUDA graph has ended: 67 ms were seen on an H100.
    """
    return engine.Stream(device, priority=-1)


class NativePart:
    """The pages of one part of a chunk: its ``layers`` in the order of the shard.

    ``places`` holds the address of this rank's shard in slot 0 and the bytes from one slot to the next; the address
    where page-locked memory begins and the bytes of one locked piece, 0 if slots are on the device; and the bytes of a
    packed shard, 0 if it is not packed.
    """

    def __init__(self, library: Library, device: Device, layers: Sequence[Layer], places: Sequence[int]):
        self._library, self._c, self._device = library, library.c, device
        self.handle = _POINTER()
        flat = (_U64 * (len(Layer._fields) * len(layers)))(*(number for layer in layers for number in layer))
        library.must(self._c.kvtier_cuda_part(device.handle, flat, len(layers), *places, ctypes.byref(self.handle)))

    def can(self, method: Method, to_slots: bool, staging: Staging | None) -> bool:
        """Does this method work for copies in this direction?"""
        return bool(self._c.kvtier_cuda_can(self._device.handle, self.handle, method, to_slots, _handle_of(staging)))

    def copy(
        self,
        method: Method,
        to_slots: bool,
        rows: array[int],
        slots: array[int],
        through: Direction,
        sums: Sums | None = None,
    ) -> None:
        """Enqueue the copies of a job: ``rows`` holds the block ids of all chunks in one flat array of int32.

        For a staged store of whole chunks, ``sums`` receives the CRC-32 of each shard, on ``bus``. With packed shards
        every job has ``sums``: a store adds a word for each chunk, 1 if the chunk did not fit its shard, whose content
        is then undefined; a load writes one word, 1 if a shard was not packed, on ``kernels``.

        When this returns, or raises BackendError, ``kernels`` comes after all access to pages, and ``bus`` after all
        writes to slots.
        """
        width = len(rows) // len(slots) if slots else 0
        addresses = rows.buffer_info()[0], slots.buffer_info()[0]
        self._library.must(
            self._c.kvtier_cuda_copy(
                *(self._device.handle, self.handle, method, to_slots, *addresses, len(slots), width),
                *(through.kernels.cuda_stream, through.bus.cuda_stream, _handle_of(through.staging)),
                *((sums.on_device, sums.told) if sums else (0, 0)),
            )
        )
        self._device.watch_batches()

    def close(self) -> None:
        """Free the library's resources for these pages. May be called twice."""
        if self.handle:
            self._c.kvtier_cuda_close_part(self._device.handle, self.handle)
        self.handle = _POINTER()


def _handle_of(staging: Staging | None) -> ctypes.c_void_p:
    return staging.handle if staging else _POINTER()


@functools.cache
def load() -> Library:
    """The library that was installed with this package. Raises BackendError."""
    path = next((each for folder in kvtier_core.__path__ if (each := Path(folder) / FILE).exists()), None)
    if path is None:
        raise BackendError(
            f"{FILE} was not built: install a C++ compiler, and nvcc for its kernels, then reinstall kvtier"
        )
    return Library(path)
