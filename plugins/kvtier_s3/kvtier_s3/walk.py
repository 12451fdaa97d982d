"""Lists everything below the prefix, for `kvtier fsck`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from kvtier_core.errors import Gone
from kvtier_core.interfaces import Stored
from kvtier_core.storekit.namespaces import FACTS
from kvtier_core.storekit.shared_space import recount
from kvtier_core.types import Seconds
from kvtier_s3.bucket import Bucket, Listed
from kvtier_s3.errors import Absent, Conflict
from kvtier_s3.names import parsed
from kvtier_s3.opening import connect
from kvtier_s3.settings import S3Settings
from kvtier_s3.space import BucketSpace

_SECONDS = Seconds(60)  # for one request
_RECOUNT_SECONDS = Seconds(300)


@contextlib.contextmanager
def everything_in(settings: S3Settings) -> Iterator[Iterator[Stored]]:
    """Everything where only frames should be, of every namespace. Raises BackendError."""
    bucket, _ = connect(settings, _SECONDS)
    with contextlib.closing(bucket.calls):
        yield _walk(bucket, settings.prefix)


def recount_bucket(settings: S3Settings) -> None:
    """Make the account of the capacity match what is in the bucket now. Raises BackendError."""
    bucket, _ = connect(settings, _SECONDS)
    with contextlib.closing(bucket.calls), bucket.calls.within(_RECOUNT_SECONDS):
        recount(BucketSpace(bucket, settings.prefix))


def _walk(bucket: Bucket, prefix: str) -> Iterator[Stored]:
    with bucket.calls.within(_SECONDS):
        homes = bucket.homes(prefix)
    for home in homes:
        for each in bucket.list(f"{prefix}/{home}"):
            if each.name != f"{prefix}/{home}/{FACTS}":
                yield _stored(bucket, prefix, each)


def _stored(bucket: Bucket, prefix: str, listed: Listed) -> Stored:
    home, key = parsed(prefix, listed.name, listed.nbytes) or (None, None)
    return Stored(
        where=f"{bucket.where}/{listed.name}",
        nbytes=listed.nbytes,
        home=home,
        key=key,
        read=functools.partial(_read, bucket, listed),
        remove=functools.partial(_remove, bucket, listed),
    )


def _read(bucket: Bucket, listed: Listed, offset: int, nbytes: int) -> bytes:
    with _only_this_version(bucket, listed):
        how = {"begin": offset, "nbytes": nbytes, "etag": listed.etag}
        return bytes(bucket.calls.one(bucket.get, listed.name, listed.nbytes, **how).body)


def _remove(bucket: Bucket, listed: Listed) -> None:
    with _only_this_version(bucket, listed):
        if bucket.calls.one(bucket.head, listed.name).etag != listed.etag:
            raise Conflict("another version")
        bucket.calls.one(bucket.delete, listed.name)


@contextlib.contextmanager
def _only_this_version(bucket: Bucket, listed: Listed) -> Iterator[None]:
    try:
        with bucket.calls.within(_SECONDS):
            yield
    except (Absent, Conflict):
        raise Gone(f"{bucket.where}/{listed.name}: replaced or removed") from None
