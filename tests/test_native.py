"""The compiled kernels against what they stand in for."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from source_copy import ROOT, SourceCopy

from kvtier_core import native
from kvtier_core.builtin.chained import chain, plain_chain
from kvtier_core.frames import checksum
from kvtier_core.transfer.copier import Copier, PlainCopier

MIB = 1 << 20

#: One stretch of bytes that are all different from their neighbours; an offset shifts every alignment.
NOISE = random.Random(0).randbytes(MIB)


def test_the_extension_was_built_here():
    """The other tests would compare Python with Python."""
    assert native.extension is not None
    assert native.describe().startswith("compiled; checksums by ")


@given(st.integers(0, 300), st.integers(0, 5000), st.integers(0, 2**32 - 1))
@example(0, 0, 0)
@example(3, 100_000, 2**32 - 1)
def test_crc32_continues_as_zlib_does(start, nbytes, before):
    piece = NOISE[start : start + nbytes]
    assert checksum.crc32(piece, before) == zlib.crc32(piece, before)


def test_crc32_of_every_short_length():
    for nbytes in range(1100):
        assert checksum.crc32(NOISE[7 : 7 + nbytes]) == zlib.crc32(NOISE[7 : 7 + nbytes])


def test_crc32_takes_any_buffer():
    assert checksum.crc32(memoryview(bytearray(NOISE))) == zlib.crc32(NOISE)
    with pytest.raises(TypeError):
        checksum.crc32("text")
    with pytest.raises(BufferError):
        checksum.crc32(memoryview(NOISE)[::2])


@pytest.mark.parametrize("combine", [checksum.combine, checksum.plain_combine])
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_combined_checksums_are_those_of_both_pieces(combine, cut, end):
    first, second = NOISE[:cut], NOISE[cut : cut + end]
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_combine_over_a_terabyte():
    assert checksum.combine(1, 2, 1 << 40) == checksum.plain_combine(1, 2, 1 << 40)


def test_joined_checksums_are_those_of_the_whole():
    parts = [NOISE[:1000], NOISE[1000:1001], NOISE[1001:3000]]
    assert checksum.join([zlib.crc32(each) for each in parts], [1000, 1, 1999]) == zlib.crc32(NOISE[:3000])


class Pages:
    """Layers of pages in one poisoned buffer, slots in another."""

    ROW, BLOCKS, SLOTS = 3, 40, 6

    def __init__(self, copier, nbytes: int, *, gap: int, skew: int):
        stride = nbytes + gap
        self.pages = bytearray(NOISE * (2 * stride * self.BLOCKS // MIB + 1))
        self.slot_nbytes = 2 * nbytes * self.ROW + 4096
        self.slots = bytearray(b"\xa5" * (self.SLOTS * self.slot_nbytes + skew))
        base, shard = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (self.pages, self.slots))
        second = base + stride * self.BLOCKS
        layers = [(base, stride, nbytes, 0, 0, self.ROW), (second, stride, nbytes, nbytes * self.ROW, 0, self.ROW)]
        self.copier = copier(layers, shard + skew, self.slot_nbytes)


@pytest.mark.parametrize("gap", [0, 64], ids=["dense", "padded"])
@pytest.mark.parametrize("skew", [0, 1, 4096], ids="skewed by {}".format)
@pytest.mark.parametrize("nbytes", [256, 4096, 40_000, 262_144 + 16], ids="pages of {}".format)
def test_copies_small_and_large(nbytes, gap, skew):
    """Aligned pieces of large jobs go past the caches; small pages are not checksummed 256 bytes at a time."""
    mine, plain = (Pages(copier, nbytes, gap=gap, skew=skew) for copier in (Copier, PlainCopier))
    rows = [[0, 1, 2], [9, -1, 8], [-1, 39, -1], [20, 21, 35]]
    for each in (mine, plain):
        checksums = each.copier.gather(rows, [5, 0, 3, 2])
    assert mine.slots == plain.slots
    assert mine.pages == plain.pages
    shards = (slot * mine.slot_nbytes + skew for slot in (5, 0, 3, 2))
    in_slots = [zlib.crc32(memoryview(mine.slots)[at : at + 2 * nbytes * mine.ROW]) for at in shards]
    assert mine.copier.gather(rows, [5, 0, 3, 2]) == in_slots and not checksums
    for each in (mine, plain):
        each.copier.scatter([[3, 4, 5], [30, -1, 31]], [0, 5])
    assert mine.pages == plain.pages
    assert mine.slots == plain.slots


#: Prints what is used; fails unless all of it is Python's.
ALL_PLAIN = (
    "import zlib; from kvtier_core import native;"
    "from kvtier_core.builtin import chained; from kvtier_core.transfer import packing;"
    "from kvtier_core.frames import checksum; from kvtier_core.storekit import files;"
    "from kvtier_core.transfer import copier;"
    "from kvtier_core.policies import gittins, lru; from kvtier_core.stack.index import prefix_tree;"
    "assert native.extension is None;"
    "assert checksum.crc32 is zlib.crc32 and checksum.combine is checksum.plain_combine;"
    "assert copier.Copier is copier.PlainCopier and chained.chain is chained.plain_chain;"
    "assert packing.pack is packing.plain_pack and packing.unpack is packing.plain_unpack;"
    "assert prefix_tree.PrefixTree is prefix_tree.PlainPrefixTree and not files.ring_works();"
    "assert type(lru.LruConfig().open()) is lru.Lru and type(gittins.GittinsConfig().open()) is gittins.Gittins;"
    "print(native.describe())"
)


def in_copy(folder, script):
    """What a script prints that imports the copy of the sources in this folder."""
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def copy(tmp_path):
    """A copy of the sources with what was compiled from them; without csrc, as in a wheel."""
    SourceCopy(tmp_path, native.extension.__file__)
    shutil.rmtree(tmp_path / "csrc")
    return tmp_path


def with_sources(folder):
    shutil.copytree(ROOT / "csrc", folder / "csrc")


def test_without_it_everything_is_there_in_python(tmp_path):
    """Where nothing could be compiled."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['kvtier_core._native'] = None")
    assert in_copy(tmp_path, ALL_PLAIN).startswith(
        "the native extension is missing; using Python instead, which is slower: "
    )


def test_the_stamp_of_the_extension_is_that_of_the_sources():
    assert native.extension.stamp == native.stamp_of(ROOT / "csrc")


def shipped(folder):
    (folder / "kvtier_core/_native.stamp").write_text(native.extension.stamp + "\n")


@pytest.mark.parametrize("told_by", [with_sources, shipped])
def test_the_extension_is_used_with_the_sources_it_was_built_from(copy, told_by):
    """In a checkout the sources tell, in a wheel the stamp that was installed with it."""
    told_by(copy)
    where = "from kvtier_core import native; print(native.__file__, native.describe())"
    assert in_copy(copy, where).startswith(f"{copy / 'kvtier_core/native.py'} compiled; ")


def changed(folder):
    with_sources(folder)
    with (folder / "csrc/copy.h").open("a") as file:
        file.write("// another line\n")


def added(folder):
    with_sources(folder)
    (folder / "csrc/policies/new.cpp").write_text("")


def removed(folder):
    with_sources(folder)
    (folder / "csrc/policies/lru.h").unlink()


def of_another_wheel(folder):
    (folder / "kvtier_core/_native.stamp").write_text("0" * 64)


def torn(folder):
    (folder / "kvtier_core/_native.stamp").write_bytes(b"\xff\0")


def neither(folder):
    """Neither sources nor a stamp: nobody knows."""


@pytest.mark.parametrize("stale", [changed, added, removed, of_another_wheel, torn, neither])
def test_a_stale_one_is_not_used_for_anything(copy, stale):
    """Half of it in C++ and half in Python would be neither one version nor the other."""
    stale(copy)
    told = in_copy(copy, ALL_PLAIN)
    assert told.startswith(
        "the native extension was built from different sources; using Python instead, which is slower: rebuild "
    )
    assert told.count("\n") == 1


def test_one_that_bears_no_stamp_is_not_used(copy):
    """As it was built before there were stamps."""
    with_sources(copy)
    for found in (copy / "kvtier_core").glob("_native*"):
        found.unlink()
    (copy / "kvtier_core/_native.py").write_text("crc32 = crc32_method = None")
    assert "built from different sources" in in_copy(copy, ALL_PLAIN)


def test_cuda_is_a_library_of_its_own(copy):
    with_sources(copy)
    with (copy / "csrc/cuda/pages.h").open("a") as file:
        file.write("// another line\n")
    assert in_copy(copy, "from kvtier_core import native; print(native.describe())").startswith("compiled; ")


def test_a_name_that_it_lacks_is_an_error():
    """Python's counterpart would hide that something is missing."""
    with pytest.raises(AttributeError, match="no_such_name"):
        native.choose("no_such_name", len)
    assert native.choose("crc32", len) is native.extension.crc32


def test_the_extension_links_nothing_of_the_engines():
    """Neither libtorch nor libcudart: it works beside any of them."""
    env = {**os.environ, "LD_PRELOAD": ""}  # vLLM, in this process, may have set it
    ldd = subprocess.run(["ldd", native.extension.__file__], env=env, capture_output=True, text=True, check=True)
    assert {line.split()[0].split(".so")[0].rsplit("/")[-1] for line in ldd.stdout.splitlines()} <= {
        "linux-vdso", "libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64", "libpthread"
    }  # fmt: skip


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=200),
    st.integers(1, 70),
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 5), st.binary(max_size=300)),
    st.text("kvtier-", max_size=16),
)
@example(list(range(24)), 24, 0, {}, "as long as a block of the digest")
def test_keys_of_a_prompt(tokens, chunk_tokens, first, extra, person):
    parent, person = NOISE[:32], person[:16]
    told = plain_chain(parent, tokens, chunk_tokens, first, extra, person)
    assert chain(parent, tokens, chunk_tokens, first, extra, person) == told
    assert chain(parent, tuple(tokens), chunk_tokens, first, extra, person) == told


@pytest.mark.parametrize(
    ("parent", "chunk_tokens", "person", "why"),
    [
        (b"short", 1, "", "a key is 32 bytes"),
        (NOISE[:32], 0, "", "a chunk has tokens"),
        (NOISE[:32], 1, "x" * 17, "a person has 16 bytes at most"),
    ],
)
def test_invalid_keys_are_refused(parent, chunk_tokens, person, why):
    with pytest.raises(ValueError, match=f"^{why}$"):
        chain(parent, [1], chunk_tokens, 0, {}, person)
