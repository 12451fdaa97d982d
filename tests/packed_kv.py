"""KV as the packed codec has it: values like those of a model, and layouts of slots that are packed."""

from __future__ import annotations

import hashlib
import random
import struct

from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure

TILE = 4096  # bytes of the payload
HEADER = struct.Struct("<8sQ48x")
HEAD_NBYTES = 32
RAW = 255


def values(*numbers):
    return struct.pack(f"<{len(numbers)}H", *numbers)


def bfloat16(number):
    return struct.unpack("<I", struct.pack("<f", number))[0] >> 16


def kv_like(count):
    """``count`` values with exponents as those of KV, each rarer than the one above it, and some zeros."""
    noise = struct.unpack(f"<{count}I", hashlib.shake_128(b"kvtier").digest(4 * count))

    def value(each):
        exponent = 127 - ((each & -each).bit_length() - 1) * 3 // 2
        return each >> 24 << 15 & 0x8000 | exponent << 7 | each >> 25 if each % 999 else 0

    return values(*map(value, noise))


KV = kv_like(11 * 2048 + 300)


def layout_of(page_nbytes=(12288, 4096), blocks=4, ranks=1, *, packed=True, dtype="bfloat16", **group):
    kind = {"kind": KVKind.FULL_ATTENTION, "structure": KVStructure.KEYS_AND_VALUES, **group}
    return ChunkLayout(
        [KVGroup("all", page_nbytes=page_nbytes, block_tokens=16, dtype=dtype, **kind)],
        16 * blocks,
        ranks,
        packed=packed,
    )


def kv(nbytes, seed=0):
    start = random.Random(seed).randrange(len(KV) // 2) * 2
    return (KV[start:] + KV * (nbytes // len(KV) + 1))[:nbytes]
