"""The NUMA nodes from which the kernel takes the memory that a thread allocates."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

#: libc has no functions for these calls; their numbers differ between architectures.
_NUMBERS = {
    "x86_64": {"set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"set_mempolicy": 237, "get_mempolicy": 236},
}
_DEFAULT, _PREFERRED, _INTERLEAVE = 0, 1, 3
_MASK_NBYTES = 1024 // 8  # no kernel is built for more than 1024 nodes
_MASK_LENGTH = 8 * _MASK_NBYTES + 1  # in bits; the kernel uses one bit less than it is passed

_libc = ctypes.CDLL(None, use_errno=True)


class MemoryPolicy(NamedTuple):
    """A rule of ``set_mempolicy``: a mode and the nodes to which it applies."""

    mode: int
    nodes: frozenset[int] = frozenset()

    @property
    def is_default(self) -> bool:
        """Does memory come from the node of the CPU that the thread runs on?"""
        return self.mode == _DEFAULT


def preferring(node: int) -> MemoryPolicy:
    """Take memory from this node, and from others when it has none left."""
    return MemoryPolicy(_PREFERRED, frozenset({node}))


def interleaving(nodes: Iterable[int]) -> MemoryPolicy:
    """Take pages from these nodes in turn, and from others when they have none left."""
    return MemoryPolicy(_INTERLEAVE, frozenset(nodes))


def current() -> MemoryPolicy:
    """The policy of this thread. Raises OSError if the kernel does not report it."""
    mode, mask = ctypes.c_int(), ctypes.create_string_buffer(_MASK_NBYTES)
    _call("get_mempolicy", ctypes.byref(mode), mask, _MASK_LENGTH, None, 0)
    bits = int.from_bytes(mask.raw, "little")
    return MemoryPolicy(mode.value, frozenset(node for node in range(bits.bit_length()) if bits >> node & 1))


@contextlib.contextmanager
def under(policy: MemoryPolicy) -> Iterator[None]:
    """Give the thread this policy in this block, and then its former one. Raises OSError if the kernel refuses."""
    former = current()
    _set(policy)
    try:
        yield
    finally:
        _set(former)


def _set(policy: MemoryPolicy) -> None:
    bits = sum(1 << node for node in policy.nodes)
    _call("set_mempolicy", policy.mode, bits.to_bytes(_MASK_NBYTES, "little"), _MASK_LENGTH)


def _call(name: str, *args: Any) -> None:
    numbers = _NUMBERS.get(os.uname().machine)
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    longs = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    if _libc.syscall(ctypes.c_long(numbers[name]), *longs) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
