"""Lists everything below the prefix, for `kvtier fsck`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from kvtier_core.errors import BackendError, Gone
from kvtier_core.interfaces import Stored
from kvtier_core.transfer.shared_space import recount
from kvtier_s3.bucket import Bucket, Listed
from kvtier_s3.http import Request, Response
from kvtier_s3.names import FACTS, is_home, place_of
from kvtier_s3.opening import connect
from kvtier_s3.settings import S3Settings
from kvtier_s3.space import BucketSpace

_SECONDS = 60.0  # for one request


@contextlib.contextmanager
def everything_in(settings: S3Settings) -> Iterator[Iterator[Stored]]:
    """Everything where only frames should be, of every namespace. Raises BackendError."""
    bucket, _ = connect(settings)
    try:
        yield _walk(bucket, settings.prefix)
    finally:
        bucket.client.close()


def recount_bucket(settings: S3Settings) -> None:
    """Make the account of the capacity say what lies in the bucket now. Raises BackendError."""
    bucket, _ = connect(settings)
    try:
        with bucket.client.within(_SECONDS):
            recount(BucketSpace(bucket, settings.prefix))
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
    response = _ask(bucket, listed, bucket.get(listed.name, into, begin=offset, nbytes=nbytes, etag=listed.etag))
    if response.status != 206 or not response.fits:
        raise BackendError(f"{bucket.where}/{listed.name}: the store does not return the range that it was asked for")
    return bytes(into[: response.nbytes])


def _remove(bucket: Bucket, listed: Listed) -> None:
    if _ask(bucket, listed, bucket.head(listed.name)).headers.get("etag") != listed.etag:
        raise Gone(f"{bucket.where}/{listed.name}: replaced")
    _ask(bucket, listed, bucket.delete(listed.name))


def _ask(bucket: Bucket, listed: Listed, request: Request) -> Response:
    with bucket.client.within(_SECONDS):
        response = bucket.ask(request)
    if response.status in (404, 412):
        raise Gone(f"{bucket.where}/{listed.name}: replaced or removed")
    failure = bucket.failure(response)
    if failure is not None:
        raise failure
    return response
