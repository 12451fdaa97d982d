"""Opens a bucket: credentials, endpoint, and what the store can do."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.interfaces import OpenContext
from kvtier_core.storekit.namespaces import FACTS_NBYTES
from kvtier_core.storekit.shared_space import SharedSpace
from kvtier_core.types import Seconds
from kvtier_s3.account import Account
from kvtier_s3.backend import S3Backend
from kvtier_s3.bucket import Bucket
from kvtier_s3.calls import Calls
from kvtier_s3.errors import StoreDown, Unanswered
from kvtier_s3.names import Names
from kvtier_s3.settings import S3Settings
from kvtier_s3.space import MOST_LISTED, QUANTUM, BucketSpace, conditions_hold
from kvtier_s3.writes import Writer

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

#: Attempts after the first one, after pauses that are random and ever longer.
_RETRIES: RetryConfig = {
    "max_retries": 4,
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}


def open_backend(settings: S3Settings, ctx: OpenContext) -> S3Backend:
    """Raises BackendError if the bucket cannot be used. A store that does not answer may do so later."""
    bucket, facts = connect(settings, ctx.timeout)
    names = Names.of(settings.prefix, ctx.namespace)
    space = None
    try:
        with bucket.calls.within(ctx.timeout):
            reached = _reach(bucket, names, ctx)
            if ctx.capacity:
                ledger = _space(bucket, settings.prefix, ctx.capacity)
                space = SharedSpace(ledger, ctx.capacity, quantum=QUANTUM, most_listed=MOST_LISTED)
    except BaseException:
        bucket.calls.close()
        raise
    facts |= {} if reached else {"store": "not reached; it is asked again"}
    writer = Writer(bucket, names, part=settings.part, requests=settings.requests)
    return S3Backend(bucket, names, writer, space, part=settings.part, timeout=ctx.timeout, facts=facts)


def connect(settings: S3Settings, timeout: Seconds) -> tuple[Bucket, dict[str, str]]:
    """The bucket, of which nothing was asked yet, and what became of the settings. Raises BackendError.

    ``timeout`` is that of one request, with its repetitions.
    """
    account = Account.find(profile=settings.profile, region=settings.region, endpoint=settings.endpoint, ca=settings.ca)
    by_host = settings.addressing == "virtual" or (
        settings.addressing == "auto" and account.of_aws and "." not in settings.bucket
    )
    unsigned = settings.unsigned == "on" or (settings.unsigned == "auto" and account.protects_bytes)
    url = account.url_of(settings.bucket) if by_host else account.url
    # Settings that obstore would take from the environment are named here, where it would decide otherwise than boto3.
    how: S3Config = {"region": account.region, "endpoint": url, "aws_endpoint_url_s3": url, "conditional_put": "etag"}
    how |= {"virtual_hosted_style_request": by_host, "unsigned_payload": unsigned, "skip_signature": False}
    how |= {"disable_bulk_delete": True, **_encryption(settings)}
    limit = timedelta(seconds=timeout)
    try:
        store = S3Store(
            settings.bucket,
            config=how,
            credential_provider=account.credentials,
            client_options=_client_options(account, limit),
            retry_config={**_RETRIES, "retry_timeout": limit},
        )
    except (BaseError, OSError, ValueError):
        what = f"{account.ca}: no certificates" if account.ca is not None else "obstore refuses these settings"
        raise BackendError(f"s3://{settings.bucket}: {what}") from None
    facts = {
        "addressing": f"{settings.addressing} -> {'virtual' if by_host else 'path'}",
        "unsigned": f"{settings.unsigned} -> {'on' if unsigned else 'off'}",
    }
    return Bucket(settings.bucket, Calls(f"s3://{settings.bucket}", settings.requests), store), facts


def _client_options(account: Account, limit: timedelta) -> ClientConfig:
    trusted: ClientConfig = {} if account.ca is None else {"root_certificate": account.ca.read_bytes()}
    return {"allow_http": account.url.startswith("http:"), "timeout": limit, "connect_timeout": limit, **trusted}


def _encryption(settings: S3Settings) -> S3Config:
    if settings.sse == "none":
        return {}
    key: S3Config = {"sse_kms_key_id": settings.kms_key} if settings.kms_key else {}
    return {"server_side_encryption": settings.sse, **key}


def _reach(bucket: Bucket, names: Names, ctx: OpenContext) -> bool:
    """Leave the facts of the namespace beside its frames. False if the store does not answer.

    Raises BackendError if it refuses to be read. A missing permission to write shows with the first frame.
    """
    try:
        explained = bucket.fetch(names.facts, FACTS_NBYTES) is not None
    except BackendError as error:
        if isinstance(error, StoreDown) and not isinstance(error, Unanswered):
            raise
        return False
    if not explained:
        with contextlib.suppress(BackendError):
            bucket.calls.one(bucket.put, names.facts, ctx.namespace.to_json().encode())
    return True


def _space(bucket: Bucket, prefix: str, capacity: int) -> BucketSpace:
    if not conditions_hold(bucket, prefix):
        why = (
            f"{bucket.where}: the store does not know If-Match and If-None-Match, so that engines cannot count together"
        )
        raise ConfigError([Problem("", "$.capacity", why, "leave it out, and let the store expire objects")])
    return BucketSpace(bucket, prefix, ahead=capacity // 64)
