"""Who asks, and where the store is: what boto3 would find in the environment, the profile and the role."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.session import Session

from kvtier_core.errors import BackendError
from kvtier_s3.http import Endpoint
from kvtier_s3.signing import Credentials

_REGION = "us-east-1"


@attrs.frozen
class Account:
    """What botocore found. Not shown: it holds the credentials."""

    endpoint: Endpoint
    region: str
    of_aws: bool  #: no other endpoint was named, here or in the environment
    _source: Any = attrs.field(repr=False)  #: botocore's credentials, which refresh themselves

    @classmethod
    def find(cls, *, profile: str | None, region: str | None, endpoint: str | None, ca: Path | None) -> Account:
        """Raises BackendError if there are no credentials, or if what is configured cannot be used."""
        try:
            session = Session(profile=profile)
            credentials = session.get_credentials()
            region = region or session.get_config_variable("region") or _REGION
            client = session.create_client("s3", region_name=region, config=Config(signature_version="s3v4"))
            url, host = endpoint or client.meta.endpoint_url, client.meta.endpoint_url
            client.close()
            bundle = ca or session.get_config_variable("ca_bundle")
        except (BotoCoreError, ValueError) as error:
            raise BackendError(f"the AWS configuration cannot be used: {type(error).__name__}") from None
        if credentials is None:
            raise BackendError(
                "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
            )
        return cls(_endpoint(url, bundle), region, endpoint is None and ".amazonaws.com" in host, credentials)

    def credentials(self) -> Credentials:
        """The current ones; botocore refreshes them here. Raises BackendError."""
        try:
            return self._source.get_frozen_credentials()
        except BotoCoreError as error:
            raise BackendError(f"the credentials cannot be refreshed: {type(error).__name__}") from None

    @property
    def protects_bytes(self) -> bool:
        """Does TLS protect what is sent, or does it not leave this machine?"""
        return self.endpoint.tls is not None or _is_this_machine(self.endpoint.host)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _endpoint(url: str, ca: Path | str | None) -> Endpoint:
    try:
        parts = urlsplit(url)
        port = parts.port
        tls = ssl.create_default_context(cafile=None if ca is None else str(ca)) if parts.scheme == "https" else None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise BackendError(f"{ca or url}: {getattr(error, 'strerror', None) or error}") from None
    if not parts.hostname or parts.path.strip("/") or parts.scheme not in ("http", "https"):
        raise BackendError("the endpoint is not https://HOST:PORT")
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls)
