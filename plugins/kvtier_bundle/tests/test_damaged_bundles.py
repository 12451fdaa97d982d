"""Of a damaged bundle each frame is the right one or a miss, however it is read."""

import contextlib
import io
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from sizes import LONG

from kvtier_bundle.backend import BundleBackend
from kvtier_bundle.format import Writer, frames_of, read_head
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal, verify
from kvtier_testing.samples import make_frame, make_keys, make_namespace

NAMESPACE = make_namespace()
NBYTES = 8192
KEY, *_ = KEYS = make_keys(5)
FRAMES = {key: bytes(make_frame(key, NBYTES, seed)) for seed, key in enumerate(KEYS)}


def bundle(namespace=NAMESPACE) -> bytes:
    file = io.BytesIO()
    writer = Writer(file, namespace)
    writer.begin()
    for key, frame in FRAMES.items():
        writer.add(key, frame)
    writer.finish()
    return file.getvalue()


WHOLE = bundle()


def damaged(rng: random.Random) -> bytes:
    """A bundle with one to three faults of the kinds that copies, disks and strangers cause."""
    content = bytearray(WHOLE)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content))
        if rng.random() < 0.5:  # most bytes are payloads
            at = rng.choice([0, 4096, 4096 + NBYTES, len(WHOLE) - 300]) + rng.randrange(300)
        nbytes = rng.choice([1, 4, 8, 48, 4096, NBYTES])
        kind = rng.randrange(6)
        if kind == 0:
            content[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            del content[at : at + nbytes]
        elif kind == 3:
            content[at:at] = rng.randbytes(nbytes)
        elif kind == 4:
            content[at : at + nbytes] = WHOLE[(begin := rng.randrange(len(WHOLE))) : begin + nbytes]
        else:
            content[at : at + 8] = rng.choice([0, 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 4096]).to_bytes(8, "little")
        content = content or bytearray(b"\0")
    return bytes(content)


def from_tier(path: Path) -> dict[bytes, bytes]:
    """The frames that a stack accepts from a tier of the bundle at this path."""
    accepted = {}
    with contextlib.closing(BundleBackend(path, NAMESPACE)) as tier:
        for key in FRAMES:
            view = memoryview(bytearray(NBYTES))
            (count,) = tier.read([key], [view])
            if isinstance(count, int) and count and verify(view[:count], NAMESPACE, key) is None:
                accepted[key] = bytes(view[:count])
    return accepted


def from_stream(content: bytes) -> dict[bytes, bytes]:
    """The frames that an import accepts."""
    accepted = {}
    with contextlib.suppress(BackendError):
        file = io.BytesIO(content)
        if read_head(file) == NAMESPACE:
            for header, frame in frames_of(file):
                if header.namespace == NAMESPACE.digest:
                    accepted[header.key] = frame
    return accepted


def test_no_damaged_bundle_gives_a_wrong_frame(tmp_path):
    rng, path, served = random.Random(0), tmp_path / "b", 0
    for _ in range(2000 * LONG):
        content = damaged(rng)
        path.write_bytes(content)
        os.chmod(path, 0o600)
        accepted = from_stream(content)
        with contextlib.suppress(BackendError):
            accepted |= (read := from_tier(path))
            served += len(read)
        assert all(key in FRAMES and frame[4096:] == FRAMES[key][4096:] for key, frame in accepted.items())
    assert served > 1000 * LONG, "damage to one frame costs no other"


def test_a_whole_bundle_gives_all(tmp_path):
    (tmp_path / "b").write_bytes(WHOLE)
    os.chmod(tmp_path / "b", 0o600)
    assert from_tier(tmp_path / "b") == from_stream(WHOLE) == FRAMES


def test_a_length_that_no_bytes_follow_takes_no_memory(tmp_path):
    """The header is that of a whole frame, with a payload of 1 TiB."""
    frame = bytearray(FRAMES[KEY][:4096])
    seal(memoryview(frame), NAMESPACE, KEY, 1 << 40, payload_checksum=0)
    (tmp_path / "b").write_bytes(frame + bytes(100))
    tracemalloc.start()
    try:
        with open(tmp_path / "b", "rb") as file, pytest.raises(BackendError, match="after 0 frames: shorter than"):
            next(frames_of(file))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_the_index_of_another_bundle_is_not_taken(tmp_path):
    other = bundle(make_namespace("other"))
    mixed = other[:4096] + WHOLE[4096:]
    (tmp_path / "b").write_bytes(mixed)
    os.chmod(tmp_path / "b", 0o600)
    with pytest.raises(BackendError, match="damaged: its index"):
        BundleBackend(tmp_path / "b", NAMESPACE)
