"""Opens a bucket: credentials, endpoint, and what the store can do."""

from __future__ import annotations

import contextlib
import ipaddress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import attrs
import boto3
from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.interfaces import OpenContext
from kvtier_core.storekit.namespaces import FACTS_NBYTES
from kvtier_core.storekit.shared_space import SharedSpace
from kvtier_core.types import Seconds
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

_REGION = "us-east-1"
#: Credentials from boto3 are valid for at least ten minutes; it refreshes them in time if it is asked.
_ASK_AGAIN = timedelta(minutes=5)
#: Attempts after the first, each after a random pause from an ever longer range.
_RETRIES: RetryConfig = {
    "max_retries": 4,
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}


@attrs.frozen
class _Session:
    """Who asks, and where the store is, as boto3 finds it in the environment, the profile and the role."""

    url: str  #: ``https://HOST:PORT``
    region: str
    of_aws: bool  #: no other endpoint was named, here or in the environment
    credentials: Boto3CredentialProvider = attrs.field(repr=False)
    ca: Path | None  #: certificates to trust, besides the system's

    @classmethod
    def find(cls, settings: S3Settings) -> _Session:
        """Raises BackendError if there are no credentials, or if what is configured cannot be used."""
        try:
            session = boto3.Session(profile_name=settings.profile)
            region = settings.region or session.region_name or _REGION
            client = session.client("s3", region_name=region, endpoint_url=settings.endpoint)
            url = client.meta.endpoint_url
            client.close()
            bundle = settings.ca or session._session.get_config_variable("ca_bundle")
            if session.get_credentials() is None:
                raise BackendError(
                    "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
                )
            credentials = Boto3CredentialProvider(session, ttl=_ASK_AGAIN)
        except (BotoCoreError, ValueError) as error:
            raise BackendError(f"invalid AWS configuration: {type(error).__name__}") from None
        return cls(_plain(url), region, ".amazonaws.com" in url, credentials, bundle and Path(bundle))

    @property
    def protects_bytes(self) -> bool:
        """Does TLS protect what is sent, or does it not leave this machine?"""
        return self.url.startswith("https:") or _is_this_machine(urlsplit(self.url).hostname or "")

    def url_of(self, bucket: str) -> str:
        """The URL of the bucket, if the host names it."""
        scheme, _, host = self.url.partition("://")
        return f"{scheme}://{bucket}.{host}"


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
    """The bucket, to which no request was made yet, and the effective settings. Raises BackendError.

    ``timeout`` is that of one request, with its repetitions.
    """
    session, where = _Session.find(settings), f"s3://{settings.bucket}"
    by_host = settings.addressing == "virtual" or (
        settings.addressing == "auto" and session.of_aws and "." not in settings.bucket
    )
    unsigned = settings.unsigned == "on" or (settings.unsigned == "auto" and session.protects_bytes)
    url = session.url_of(settings.bucket) if by_host else session.url
    # Settings that obstore would take from the environment are named here, where it would decide unlike boto3.
    how: S3Config = {"region": session.region, "endpoint": url, "aws_endpoint_url_s3": url, "conditional_put": "etag"}
    how |= {"virtual_hosted_style_request": by_host, "unsigned_payload": unsigned, "skip_signature": False}
    how |= {"disable_bulk_delete": True, **_encryption(settings)}
    limit = timedelta(seconds=timeout)
    try:
        store = S3Store(
            settings.bucket,
            config=how,
            credential_provider=session.credentials,
            client_options=_client_options(session, limit),
            retry_config={**_RETRIES, "retry_timeout": limit},
        )
    except (BaseError, OSError, ValueError):
        what = f"{session.ca}: no certificates" if session.ca is not None else "obstore refuses these settings"
        raise BackendError(f"{where}: {what}") from None
    facts = {
        "addressing": f"{settings.addressing} -> {'virtual' if by_host else 'path'}",
        "unsigned": f"{settings.unsigned} -> {'on' if unsigned else 'off'}",
    }
    return Bucket(where, Calls(where, settings.requests), store), facts


def _client_options(session: _Session, limit: timedelta) -> ClientConfig:
    trusted: ClientConfig = {} if session.ca is None else {"root_certificate": session.ca.read_bytes()}
    return {"allow_http": session.url.startswith("http:"), "timeout": limit, "connect_timeout": limit, **trusted}


def _encryption(settings: S3Settings) -> S3Config:
    if settings.sse == "none":
        return {}
    key: S3Config = {"sse_kms_key_id": settings.kms_key} if settings.kms_key else {}
    return {"server_side_encryption": settings.sse, **key}


def _reach(bucket: Bucket, names: Names, ctx: OpenContext) -> bool:
    """Leave the facts of the namespace beside its frames. Returns False if the store does not answer.

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
        why = f"{bucket.where}: the store does not support If-Match and If-None-Match, so engines cannot count together"
        raise ConfigError([Problem("", "$.capacity", why, "omit it, and let the store expire objects")])
    return BucketSpace(bucket, prefix, ahead=capacity // 64)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plain(url: str) -> str:
    parts = urlsplit(url)
    if not parts.hostname or parts.path.strip("/") or parts.username or parts.scheme not in ("http", "https"):
        raise BackendError("the endpoint is not https://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"
