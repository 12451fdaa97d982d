"""Frames to an object store on this machine and back, against other clients of the same store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import obstore
import pytest
from botocore.config import Config
from obstore.store import S3Store

from benchmarks.bare import must
from benchmarks.measure import GIB, Case, Table, Times, interleaved, progress, sized
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_s3.config import S3Config
from kvtier_testing.samples import make_layout

ROUNDS = sized(11, 1)
#: Bytes of a frame, and frames.
FRAMES = sized(((32 << 20, 2), (1 << 20, 32)), ((16 << 20, 1), (1 << 20, 2)))
KEYS = 128
PART = 8 << 20
BUCKET = "benchmark"
BOTO3, OBSTORE, TIER = "boto3", "obstore", "kvtier_s3"
EXIST = f"kvtier_s3, `contains` of {KEYS} keys"
HEADS = f"obstore, {KEYS} HEADs at once"
#: Of nobody: the server asks for none.
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_EC2_METADATA_DISABLED": "true"}


def tables(folder: Path) -> Iterator[Table]:
    with pytest.MonkeyPatch.context() as patch, _server() as port:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for frame_nbytes, count in FRAMES:
            progress(f"s3: {count} frames of {Nbytes(frame_nbytes)}, {ROUNDS} rounds each way")
            with contextlib.closing(_Bench(port, frame_nbytes, count)) as bench:
                yield _frames(bench, frame_nbytes, count)
        with contextlib.closing(_Bench(port, 2 * FRAME_ALIGNMENT, KEYS)) as bench:
            yield _existence(bench)


def _frames(bench: _Bench, frame_nbytes: int, count: int) -> Table:
    writes = interleaved(bench.writes(), ROUNDS)
    reads = interleaved(bench.reads(), ROUNDS)
    return Table(
        title=f"S3: frames of {Nbytes(frame_nbytes)}",
        says=f"{count} frames, payloads not signed, a server in Python on the same cores that keeps all in memory and "
        "checks nothing. boto3 uses one connection, frame by frame, and reads into the frame's memory; "
        "obstore makes the requests that kvtier_s3 makes, all at once in one event loop, sends from the frames and "
        "copies what it reads to their memory; kvtier_s3 copies before it sends, too. Parts are of 8MiB. Ratios are of "
        f"speeds in the same round: median (min to max) of {ROUNDS}.",
        header=("", "write GiB/s", "of boto3", "of obstore", "read GiB/s", "of boto3", "of obstore"),
        rows=[
            (case, *_cells(writes, case, bench.nbytes), *_cells(reads, case, bench.nbytes)) for case in reads.seconds
        ],
    )


def _cells(times: Times, case: str, nbytes: int) -> Iterator[object]:
    yield f"{nbytes / times.median(case) / GIB:.2f}"
    for other in (BOTO3, OBSTORE):
        yield "1" if case == other else times.ratio(other, case)


def _existence(bench: _Bench) -> Table:
    times = interleaved(bench.questions(), 3 * ROUNDS)
    return Table(
        title=f"S3: which of {KEYS} keys are there",
        says=f"All are. The same server. Median of {3 * ROUNDS} rounds; ratios round by round (min to max).",
        header=("", "ms", f"times {HEADS}"),
        rows=[(case, f"{times.median(case) * 1e3:.1f}", times.ratio(case, HEADS)) for case in times.seconds],
    )


class _Bench:
    def __init__(self, port: int, frame_nbytes: int, count: int):
        url = f"http://127.0.0.1:{port}"
        context = OpenContext(Namespace.of({"benchmark": "s3"}), make_layout((frame_nbytes - 4096,), 1))
        self.nbytes = count * frame_nbytes
        self.keys = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(count)]
        self.names = [key.hex() for key in self.keys]
        noise = os.urandom(1 << 12) * (frame_nbytes >> 12)
        self.frames = [memoryview(bytearray(noise)) for _ in self.keys]
        self.buffers = [memoryview(bytearray(frame_nbytes)) for _ in self.keys]
        self.tier: Backend = S3Config(bucket=BUCKET, endpoint=url, region="us-east-1").open(context)
        self.runner = asyncio.Runner()
        how = Config(s3={"addressing_style": "path", "payload_signing_enabled": False})
        quick = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
        self.boto3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=how.merge(quick))
        self.obstore = S3Store(
            BUCKET,
            endpoint=url,
            region="us-east-1",
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True},
        )

    def writes(self) -> list[Case]:
        return [
            Case(BOTO3, lambda: [self._put_boto3(*each) for each in self._each(self.frames)]),
            Case(OBSTORE, lambda: self._at_once(self._put_obstore(*each) for each in self._each(self.frames))),
            Case(
                TIER,
                lambda: must(self.tier.write(self.keys, self.frames) is None),
                before=lambda: self.tier.delete(self.keys),
            ),
        ]

    def reads(self) -> list[Case]:
        return [
            Case(BOTO3, lambda: [self._get_boto3(*each) for each in self._each(self.buffers)], before=self._wipe),
            Case(
                OBSTORE,
                lambda: self._at_once(self._get_obstore(*each) for each in self._each(self.buffers)),
                before=self._wipe,
            ),
            Case(TIER, self._read, before=self._wipe),
        ]

    def questions(self) -> list[Case]:
        self.tier.write(self.keys, self.frames)
        self._at_once(self._put_obstore(*each) for each in self._each(self.frames))
        return [
            Case(HEADS, lambda: self._at_once(obstore.head_async(self.obstore, name) for name in self.names)),
            Case(EXIST, lambda: must(all(self.tier.contains(self.keys)))),
        ]

    def _each(self, views: Sequence[memoryview]) -> Iterator[tuple[str, memoryview]]:
        return zip(self.names, views, strict=True)

    def _at_once(self, asked: Iterator[Coroutine[Any, Any, object]]) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*asked)

        self.runner.run(all_of_them())

    def _put_boto3(self, name: str, frame: memoryview) -> None:
        self.boto3.put_object(Bucket=BUCKET, Key=name, Body=frame.obj)

    def _get_boto3(self, name: str, into: memoryview) -> None:
        body, count = self.boto3.get_object(Bucket=BUCKET, Key=name)["Body"], 0
        while count < len(into):
            count += body.readinto(into[count:])
        body.close()

    async def _put_obstore(self, name: str, frame: memoryview) -> None:
        if len(frame) <= PART:
            await obstore.put_async(self.obstore, name, frame, mode="create")
            return
        with contextlib.suppress(FileNotFoundError):
            await obstore.head_async(self.obstore, name)
        await obstore.put_async(self.obstore, name, frame, use_multipart=True, chunk_size=PART)

    async def _get_obstore(self, name: str, into: memoryview) -> None:
        async def get(begin: int) -> None:
            piece = into[begin : begin + PART]
            how: obstore.GetOptions = {"range": (begin, begin + len(piece))} if len(into) > PART else {}
            found = await obstore.get_async(self.obstore, name, options=how)
            piece[:] = memoryview(await found.bytes_async())

        await get(0)
        await asyncio.gather(*map(get, range(PART, len(into), PART)))

    def _read(self) -> None:
        must(list(self.tier.read(self.keys, self.buffers)) == [len(view) for view in self.buffers])
        must(all(view[-9:] == frame[-9:] for view, frame in zip(self.buffers, self.frames, strict=True)))

    def _wipe(self) -> None:
        for view in self.buffers:
            view[-FRAME_ALIGNMENT:] = bytes(FRAME_ALIGNMENT)

    def close(self) -> None:
        self.tier.delete(self.keys)
        self.tier.close()
        self.runner.close()
        self.boto3.close()


@contextlib.contextmanager
def _server() -> Iterator[int]:
    """Its port, until the end."""
    command = [sys.executable, "-m", "benchmarks.s3_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield int(process.stdout.readline())
        finally:
            process.kill()
