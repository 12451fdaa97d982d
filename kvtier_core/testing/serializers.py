"""The laws of a serializer. Subclass `SerializerLaws` and name a config."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Serializer, SerializerConfig
from kvtier_core.testing.laws import Laws
from kvtier_core.testing.samples import Poisoned, make_context, same

_GARBAGE_ROUNDS = 100


class SerializerLaws(Laws):
    """Subclass, and implement `config`; and `payloads` if some bytes are no payload at all."""

    def config(self, folder: Path) -> SerializerConfig:
        return super().config(folder)

    def payloads(self) -> Iterator[bytes]:
        """Easy and hard ones, each as long as the layout says."""
        nbytes = self.layout.payload_nbytes
        rng = random.Random(0)
        yield bytes(nbytes)
        yield b"\xff" * nbytes
        yield rng.randbytes(nbytes)
        yield rng.randbytes(64) * (nbytes // 64) + bytes(nbytes % 64)
        yield bytes(rng.choice((0, 0, 0, 63, 191)) for _ in range(nbytes))

    def open(self, folder: Path) -> Serializer:
        return self.config(folder).open(make_context(layout=self.layout))

    def test_code_and_kind_are_stated(self, tmp_path: Path):
        serializer = self.open(tmp_path)
        assert type(serializer.code) is int
        assert 0 <= serializer.code <= 65535
        assert type(serializer.lossless) is bool

    def test_the_bound_is_a_bound(self, tmp_path: Path):
        serializer = self.open(tmp_path)
        bound = serializer.bound(self.layout)
        for payload in self.payloads():
            into = Poisoned(bound)
            nbytes = serializer.encode(memoryview(payload), into.view)
            assert 0 < nbytes <= bound
            assert into.untouched_beyond(nbytes), "encode wrote more than it says"

    def test_a_payload_comes_back_in_full(self, tmp_path: Path):
        """And bit for bit where that is promised."""
        serializer = self.open(tmp_path)
        for payload in self.payloads():
            encoded = encode(serializer, payload, serializer.bound(self.layout))
            into = Poisoned(len(payload))
            assert serializer.decode(memoryview(encoded), into.view) == len(payload)
            assert into.untouched_beyond(len(payload))
            assert not serializer.lossless or same(into.view, payload), "lossless means bit-equal"

    def test_no_view_is_kept(self, tmp_path: Path):
        serializer = self.open(tmp_path)
        for payload in self.payloads():
            source, target = bytearray(payload), bytearray(serializer.bound(self.layout))
            nbytes = serializer.encode(memoryview(source), memoryview(target))
            assert same(source, payload), "encode changed its source"
            encoded = target[:nbytes]
            serializer.decode(memoryview(encoded), memoryview(source))
            for buffer in (source, target, encoded):
                buffer.clear()

    @pytest.mark.parametrize("seed", range(3))
    def test_garbage_does_no_harm(self, tmp_path: Path, seed: int):
        """Random bytes, a flipped bit, a missing end: a BackendError or an answer, and nothing written outside."""
        serializer = self.open(tmp_path)
        rng = random.Random(seed)
        nbytes = self.layout.payload_nbytes
        encodings = [encode(serializer, payload, serializer.bound(self.layout)) for payload in self.payloads()]
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


def encode(serializer: Serializer, payload: bytes, bound: int) -> bytes:
    into = memoryview(bytearray(bound))
    return bytes(into[: serializer.encode(memoryview(payload), into)])
