"""The laws of a serializer. Subclass `SerializerLaws` and name a config."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.frames.identity import RAW, identity_of
from kvtier_core.interfaces import Serializer, SerializerConfig
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_testing.laws.base import Laws, in_new_process
from kvtier_testing.samples import Poisoned, make_context, same

_GARBAGE_ROUNDS = 100
#: `decode` may take this many times the length of its payload, and this many bytes for a library.
_PAYLOADS_OF_MEMORY, _LIBRARY_NBYTES = 32, 1 << 20
#: The first bits of an encoding, each of which is flipped.
_HARMED_BITS = 256

#: Threads that use one instance at the same time, and how often each of them encodes and decodes.
_THREADS, _ROUNDS = 4, 20
#: Other threads run for this many seconds between two lines of Python, in each of this many lines of a call.
_PAUSE_SECONDS, _PAUSES = 2e-5, 30

#: Bit patterns of 16 bits that arithmetic would change or merge: both zeros, subnormals, infinities, and quiet and
#: signalling NaNs with payloads, as float16 and as bfloat16.
_HARD_PATTERNS = (
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x007F),
    *(0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE55, 0x7D55),
    *(0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC5, 0x7FA5),
)


class SerializerLaws(Laws[SerializerConfig]):
    """Subclass, and implement `config`. Where these apply, also implement:

    - `others`, if the config has fields;
    - `is_close`, if the codec is lossy;
    - `payloads`, if some bytes cannot be a payload at all.
    """

    contract = "kvtier_core.interfaces.serializer"

    def others(self, folder: Path) -> Sequence[SerializerConfig]:
        """Configs of the same type with other options: at least one for each field."""
        return []

    def is_close(self, payload: bytes, decoded: bytes) -> bool:
        """Is ``decoded`` within the error that a lossy codec states, for this payload?"""
        raise NotImplementedError(f"{type(self).__name__} must say how close a lossy codec comes")

    def payloads(self) -> Iterator[bytes]:
        """Easy and hard ones, each as long as the layout says."""
        nbytes = self.layout.payload_nbytes
        rng = random.Random(0)
        yield bytes(nbytes)
        yield b"\xff" * nbytes
        yield rng.randbytes(nbytes)
        yield rng.randbytes(64) * (nbytes // 64) + bytes(nbytes % 64)
        yield bytes(rng.choice((0, 0, 0, 63, 191)) for _ in range(nbytes))
        pattern = struct.pack(f"<{len(_HARD_PATTERNS)}H", *_HARD_PATTERNS)
        yield (pattern * (nbytes // len(pattern) + 1))[:nbytes]

    def open(self, folder: Path) -> Serializer:
        """A new instance."""
        return open_serializer(self.config(folder), self.layout)

    def test_the_codec_is_named(self, tmp_path: Path) -> None:
        """A codec has an identity: the same for every equal config, and not raw's.

        Otherwise an engine could not decode the frames of another one with the same settings, or would take them for
        raw KV.
        """
        assert isinstance(self.open(tmp_path), Serializer)
        identity = identity_of(self.config(tmp_path))
        assert identity == identity_of(self.config(tmp_path)) == in_new_process(identity_of, self.config(tmp_path))
        assert identity.type != RAW.type, "raw is the name of the codec that does nothing"

    def test_other_options_are_another_codec(self, tmp_path: Path) -> None:
        """Another encoding is another identity.

        Otherwise after a change of an option each old frame would be read, decoded to other bytes, and counted as
        damaged.
        """
        config, others = self.config(tmp_path), self.others(tmp_path)
        fields = {field.name for field in attrs.fields(type(config))}
        varied = {name for other in others for name in fields if getattr(other, name) != getattr(config, name)}
        assert varied == fields, f"others() varies {sorted(varied)} of the options {sorted(fields)}"
        for one, other in itertools.combinations([config, *others], 2):
            assert one.type == other.type
            encodings = [self._encodings(each) for each in (one, other)]
            assert same(*encodings) or identity_of(one) != identity_of(other), "encodes otherwise under one identity"

    def test_the_bound_is_a_bound(self, tmp_path: Path) -> None:
        """No encoding is longer than `bound` says, and `encode` writes no more than it returns.

        Otherwise a payload that does not compress would overrun its buffer, or its chunk would never be stored.
        """
        serializer = self.open(tmp_path)
        bound = serializer.bound(self.layout)
        for payload in self.payloads():
            into = Poisoned(bound)
            nbytes = serializer.encode(memoryview(payload), into.view)
            assert 0 < nbytes <= bound
            assert into.untouched_beyond(nbytes), "encode wrote more than it says"

    def test_a_payload_comes_back_in_full(self, tmp_path: Path) -> None:
        """A payload comes back bit for bit if the codec is lossless, else within the error that it states.

        Otherwise the engine would compute on other KV. The checksum finds it for a lossless codec, and every frame is a
        miss; for a lossy one nothing does.
        """
        serializer = self.open(tmp_path)
        for payload in self.payloads():
            encoded = encode(serializer, payload, serializer.bound(self.layout))
            into = Poisoned(len(payload))
            assert serializer.decode(memoryview(encoded), into.view) == len(payload)
            assert into.untouched_beyond(len(payload))
            assert self._comes_back(tmp_path, payload, bytes(into.view))

    def test_an_error_that_is_stated_tells_payloads_apart(self, tmp_path: Path) -> None:
        """The error that a lossy codec states does not let it return zeros for everything.

        Otherwise `is_close` would let any codec pass, even one that ruins the model's answers.
        """
        if not self.config(tmp_path).lossless:
            random_payload = random.Random(1).randbytes(self.layout.payload_nbytes)
            telling = [payload for payload in (random_payload, *self.payloads()) if any(payload)]
            assert not any(self.is_close(payload, bytes(len(payload))) for payload in telling), "zeros are close"

    def test_one_instance_serves_several_threads(self, tmp_path: Path) -> None:
        """Several threads use one instance, each with its own payloads; it and a new instance decode all of them.

        Otherwise one frame would hold bytes of another under load. Its checksum finds that in a read: a miss, and a
        frame stored for nothing.
        """
        serializer, payloads = self.open(tmp_path), [payload for payload in self.payloads() if any(payload)]
        bound, together = serializer.bound(self.layout), Barrier(_THREADS)

        def work(thread: int) -> list[tuple[bytes, bytes, bytes]]:
            together.wait(timeout=60.0)
            sys.settrace(_pausing())
            seen = []
            for i in range(_ROUNDS):
                payload = payloads[(thread + i) % len(payloads)]
                encoded = encode(serializer, payload, bound)
                seen.append((payload, encoded, decode(serializer, encoded, len(payload))))
            return seen

        with ThreadPoolExecutor(_THREADS) as pool:
            seen = [each for share in pool.map(work, range(_THREADS)) for each in share]
        alone = self.open(tmp_path)
        for payload, encoded, decoded in seen:
            assert self._comes_back(tmp_path, payload, decoded), "wrong while other threads used the instance"
            assert same(decode(alone, encoded, len(payload)), decoded), "another instance decodes it otherwise"

    def test_any_instance_decodes(self, tmp_path: Path) -> None:
        """An instance that encoded nothing, or something else, decodes what another one encoded.

        Otherwise no frame could be decoded after a restart.
        """
        payloads = list(self.payloads())
        first = self.open(tmp_path)
        encodings = [encode(first, payload, first.bound(self.layout)) for payload in payloads]
        busy = self.open(tmp_path)
        encode(busy, payloads[-1], busy.bound(self.layout))
        for payload, encoded in zip(payloads, encodings, strict=True):
            here = decode(first, encoded, len(payload))
            assert same(decode(self.open(tmp_path), encoded, len(payload)), here)
            assert same(decode(busy, encoded, len(payload)), here)

    def test_any_process_decodes(self, tmp_path: Path) -> None:
        """A process decodes the encoding of another one to the same bytes.

        Otherwise each engine of a shared store would be served only what it wrote itself.
        """
        payloads, serializer = list(self.payloads()), self.open(tmp_path)
        encodings = [encode(serializer, payload, serializer.bound(self.layout)) for payload in payloads]
        here = [decode(serializer, encoded, self.layout.payload_nbytes) for encoded in encodings]
        there = in_new_process(decode_all, self.config(tmp_path), self.layout, encodings)
        assert same(there, here), "another process decodes it otherwise"

    def test_no_view_is_kept(self, tmp_path: Path) -> None:
        """A view is used only until the call returns, and `encode` does not change its source.

        Otherwise a slot would be read or changed after it was given to another chunk.
        """
        serializer = self.open(tmp_path)
        for payload in self.payloads():
            source, target = bytearray(payload), bytearray(serializer.bound(self.layout))
            nbytes = serializer.encode(memoryview(source), memoryview(target))
            assert same(source, payload), "encode changed its source"
            encoded = target[:nbytes]
            serializer.decode(memoryview(encoded), memoryview(source))
            for buffer in (source, target, encoded):
                buffer.clear()

    def test_views_begin_anywhere_and_hold_anything(self, tmp_path: Path) -> None:
        """Views begin at any address, held something else before, and may be longer than `bound` says.

        Otherwise frames encoded into a reused buffer would decode to other bytes, and each be a miss; and a codec that
        needs aligned memory would crash the engine.
        """
        serializer = self.open(tmp_path)
        bound = serializer.bound(self.layout)
        for payload, offset in zip(self.payloads(), itertools.cycle((0, 1, 333)), strict=False):
            source, into, target = (Poisoned(n, offset) for n in (len(payload), bound + 100, len(payload)))
            source.view[:] = payload
            nbytes = serializer.encode(source.view, into.view)
            assert nbytes <= bound and into.untouched_beyond(nbytes)
            assert serializer.decode(into.view[:nbytes], target.view) == len(payload)
            assert self._comes_back(tmp_path, payload, bytes(target.view))

    def test_every_part_of_a_chunk_comes_back(self, tmp_path: Path) -> None:
        """One instance takes payloads of several lengths: each part of a hybrid model's chunk has a frame.

        Otherwise models with windows or states beside full attention would store frames that nobody can decode.
        """
        whole = self.layout.groups[0]
        window = attrs.evolve(whole, name="window", kind=KVKind.SLIDING_WINDOW, reach=whole.block_tokens)
        layout = attrs.evolve(self.layout, groups=(*self.layout.groups, window))
        serializer, rng = open_serializer(self.config(tmp_path), layout), random.Random(2)
        assert len({part.payload_nbytes for part in layout.parts}) > 1
        for part in layout.parts:
            payload = rng.randbytes(part.payload_nbytes)
            encoded = memoryview(encode(serializer, payload, serializer.bound(layout)))
            into = Poisoned(len(payload))
            assert serializer.decode(encoded, into.view) == len(payload)
            assert same(bytes(into.view), payload) or not self.config(tmp_path).lossless

    @pytest.mark.parametrize("seed", range(3))
    def test_garbage_does_no_harm(self, tmp_path: Path, seed: int) -> None:
        """Random bytes, a flipped bit or a missing end give a BackendError or an answer; nothing is written outside.

        Otherwise a damaged frame would raise what nobody expects, or overwrite the next slot: the KV of another chunk.
        """
        serializer = self.open(tmp_path)
        rng = random.Random(seed)
        nbytes = self.layout.payload_nbytes
        encodings = self._encodings(self.config(tmp_path))
        for _ in range(_GARBAGE_ROUNDS):
            garbage = bytearray(rng.choice(encodings))
            match rng.choice(("random", "flipped", "short", "long")):
                case "random":
                    garbage = bytearray(rng.randbytes(rng.randrange(len(garbage))))
                case "flipped":
                    garbage[rng.randrange(len(garbage))] ^= 1 << rng.randrange(8)
                case "short":
                    del garbage[rng.randrange(len(garbage)) :]
                case "long":
                    garbage += rng.randbytes(100)
            into = Poisoned(nbytes)
            with contextlib.suppress(BackendError):
                assert 0 <= serializer.decode(memoryview(garbage), into.view) <= nbytes
            assert into.untouched_beyond(nbytes), "decode wrote outside"

    def test_garbage_takes_little_memory(self, tmp_path: Path) -> None:
        """The length that an encoding states is verified before so much memory is allocated.

        Otherwise whoever can write to a store could exhaust the engine's memory with one small frame.
        """
        serializer, encoded = self.open(tmp_path), min(self._encodings(self.config(tmp_path)), key=len)
        into = memoryview(bytearray(self.layout.payload_nbytes))
        tracemalloc.start()
        try:
            for bit in range(min(_HARMED_BITS, 8 * len(encoded))):
                garbage = bytearray(encoded)
                garbage[bit // 8] ^= 1 << bit % 8
                with contextlib.suppress(BackendError):
                    serializer.decode(memoryview(garbage), into)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < _PAYLOADS_OF_MEMORY * len(into) + _LIBRARY_NBYTES, f"decoding took {most} bytes of memory"

    def _encodings(self, config: SerializerConfig) -> list[bytes]:
        serializer = open_serializer(config, self.layout)
        return [encode(serializer, payload, serializer.bound(self.layout)) for payload in self.payloads()]

    def _comes_back(self, folder: Path, payload: bytes, decoded: bytes) -> bool:
        return same(decoded, payload) if self.config(folder).lossless else self.is_close(payload, decoded)


def open_serializer(config: SerializerConfig, layout: ChunkLayout) -> Serializer:
    """A new instance for chunks of this layout."""
    serializer = config.open(make_context(layout=layout))
    assert serializer is not None, "open() returned None: payloads are stored as they are, and there is nothing to try"
    return serializer


def _pausing() -> Callable[..., Any]:
    """A trace function of a thread, which lets others run between the lines of what the thread calls."""
    lines = itertools.count()

    def trace(frame: object, event: str, argument: object) -> Any:
        if event == "call":
            return _pausing()
        if event == "line":
            if next(lines) >= _PAUSES:
                return None
            time.sleep(_PAUSE_SECONDS)
        return trace

    return trace


def encode(serializer: Serializer, payload: bytes, bound: int) -> bytes:
    """The encoding of a payload, in a buffer of ``bound`` bytes."""
    into = memoryview(bytearray(bound))
    return bytes(into[: serializer.encode(memoryview(payload), into)])


def decode(serializer: Serializer, encoded: bytes, payload_nbytes: int) -> bytes:
    """The payload of an encoding."""
    into = memoryview(bytearray(payload_nbytes))
    return bytes(into[: serializer.decode(memoryview(encoded), into)])


def decode_all(config: SerializerConfig, layout: ChunkLayout, encodings: Sequence[bytes]) -> list[bytes]:
    """The payloads of encodings, by a new instance."""
    serializer = open_serializer(config, layout)
    return [decode(serializer, encoded, layout.payload_nbytes) for encoded in encodings]
