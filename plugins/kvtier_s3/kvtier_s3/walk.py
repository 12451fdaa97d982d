"""Lists everything below the prefix, for `kvtier fsck`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Stored
from kvtier_s3.bucket import Bucket, Listed
from kvtier_s3.config import S3Config
from kvtier_s3.names import FACTS, is_home, place_of
from kvtier_s3.opening import connect
from kvtier_s3.space import BucketSpace

_SECONDS = 60.0  # for one request


@contextlib.contextmanager
def everything_in(config: S3Config) -> Iterator[Iterator[Stored]]:
    """Everything where only frames should be, of every namespace. Raises BackendError."""
    bucket, _ = connect(config)
    try:
        yield _walk(bucket, config.prefix)
    finally:
        bucket.client.close()


def recount(config: S3Config, nbytes: int) -> None:
    """Correct the account of the capacity. Raises BackendError."""
    bucket, _ = connect(config)
    try:
        with bucket.client.within(_SECONDS):
            BucketSpace(bucket, config.prefix).set(nbytes)
    finally:
        bucket.client.close()


def _walk(bucket: Bucket, prefix: str) -> Iterator[Stored]:
    with bucket.client.within(_SECONDS):
        homes = [home for home in bucket.folders(f"{prefix}/") if is_home(home)]
    for home in homes:
        for each in bucket.list([f"{prefix}/{home}/"]):
            if each.name != f"{prefix}/{home}/{FACTS}":
                yield _stored(bucket, prefix, each)


def _stored(bucket: Bucket, prefix: str, listed: Listed) -> Stored:
    place = place_of(prefix, listed.name, listed.nbytes)
    return Stored(
        where=f"{bucket.where}/{listed.name}",
        nbytes=listed.nbytes,
        home=bytes.fromhex(place.home) if place else None,
        key=place.key if place else None,
        read=functools.partial(_read, bucket, listed),
        remove=functools.partial(_remove, bucket, listed),
    )


def _read(bucket: Bucket, listed: Listed, offset: int, nbytes: int) -> bytes:
    into = memoryview(bytearray(nbytes))
    with bucket.client.within(_SECONDS):
        response = bucket.must(bucket.get(listed.name, into, begin=offset, nbytes=nbytes, etag=listed.etag))
    if response.status != 206 or not response.fits:
        raise BackendError(f"{bucket.where}/{listed.name}: the store does not return the range that it was asked for")
    return bytes(into[: response.nbytes])


def _remove(bucket: Bucket, listed: Listed) -> None:
    with bucket.client.within(_SECONDS):
        bucket.must(bucket.delete(listed.name))
