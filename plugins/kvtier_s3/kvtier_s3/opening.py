"""Opens a bucket: credentials, endpoint, and what the store can do."""

from __future__ import annotations

import contextlib

from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.interfaces import OpenContext
from kvtier_core.transfer.shared_space import SharedSpace
from kvtier_s3.account import Account
from kvtier_s3.backend import S3Backend
from kvtier_s3.bucket import Bucket
from kvtier_s3.client import Client
from kvtier_s3.errors import StoreDown, Untrusted, error_of
from kvtier_s3.http import Endpoint, Response
from kvtier_s3.names import Names
from kvtier_s3.settings import S3Settings
from kvtier_s3.signing import Signer
from kvtier_s3.space import QUANTUM, BucketSpace, conditions_hold
from kvtier_s3.writes import Writer


def open_backend(settings: S3Settings, ctx: OpenContext) -> S3Backend:
    """Raises BackendError if the bucket cannot be used. A store that does not answer may do so later."""
    bucket, facts = connect(settings)
    names = Names.of(settings.prefix, ctx.namespace)
    space = None
    try:
        with bucket.client.within(ctx.timeout):
            reached = _reach(bucket)
            if ctx.capacity:
                space = SharedSpace(_space(bucket, settings.prefix, ctx.capacity), ctx.capacity, quantum=QUANTUM)
            if reached:
                _explain(bucket, names, ctx)
    except BaseException:
        bucket.client.close()
        raise
    facts |= {} if reached else {"store": "not reached; it is asked again"}
    writer = Writer(bucket, names, settings.part)
    return S3Backend(bucket, names, writer, space, part=settings.part, timeout=ctx.timeout, facts=facts)


def connect(settings: S3Settings) -> tuple[Bucket, dict[str, str]]:
    """The bucket, of which nothing was asked yet, and what became of the settings. Raises BackendError."""
    account = Account.find(profile=settings.profile, region=settings.region, endpoint=settings.endpoint, ca=settings.ca)
    by_host = settings.addressing == "virtual" or (
        settings.addressing == "auto" and account.of_aws and "." not in settings.bucket
    )
    unsigned = settings.unsigned == "on" or (settings.unsigned == "auto" and account.protects_bytes)
    found = account.endpoint
    endpoint = Endpoint(f"{settings.bucket}.{found.host}", found.port, found.tls) if by_host else found
    client = Client(endpoint, Signer(account.credentials, account.region, unsigned), settings.requests)
    facts = {
        "addressing": f"{settings.addressing} -> {'virtual' if by_host else 'path'}",
        "unsigned": f"{settings.unsigned} -> {'on' if unsigned else 'off'}",
    }
    return Bucket(settings.bucket, client, "" if by_host else f"/{settings.bucket}", _encryption(settings)), facts


def _encryption(settings: S3Settings) -> dict[str, str]:
    if settings.sse == "none":
        return {}
    key = {"x-amz-server-side-encryption-aws-kms-key-id": settings.kms_key} if settings.kms_key else {}
    return {"x-amz-server-side-encryption": settings.sse, **key}


def _reach(bucket: Bucket) -> bool:
    """Is the bucket there? False if the store does not answer. Raises BackendError if it refuses."""
    (answer,) = bucket.exchange([bucket.head()])
    if isinstance(answer, Untrusted):
        raise answer
    if not isinstance(answer, Response) or answer.status >= 500:
        return False
    if answer.status == 404:
        raise StoreDown(f"{bucket.where}: there is no such bucket")
    if answer.status != 200:
        raise error_of(answer, bucket.where)
    return True


def _space(bucket: Bucket, prefix: str, capacity: int) -> BucketSpace:
    if not conditions_hold(bucket, prefix):
        why = (
            f"{bucket.where}: the store does not know If-Match and If-None-Match, so that engines cannot count together"
        )
        raise ConfigError([Problem("", "$.capacity", why, "leave it out, and let the store expire objects")])
    return BucketSpace(bucket, prefix, ahead=capacity // 64)


def _explain(bucket: Bucket, names: Names, ctx: OpenContext) -> None:
    """Leave the facts of the namespace beside its frames. Whoever may not write is told at the first frame."""
    with contextlib.suppress(BackendError):
        if bucket.fetch(names.facts) is None:
            bucket.must(bucket.put(names.facts, ctx.namespace.to_json().encode()))
