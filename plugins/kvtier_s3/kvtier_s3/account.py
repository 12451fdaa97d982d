"""Who asks, and where the store is: what boto3 finds in the environment, the profile and the role."""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import boto3
from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider

from kvtier_core.errors import BackendError

_REGION = "us-east-1"
#: Credentials that boto3 returns are good for ten minutes at least; it refreshes them in time if it is asked.
_ASK_AGAIN = timedelta(minutes=5)


@attrs.frozen
class Account:
    """The session of boto3. Not shown: it holds the credentials."""

    url: str  #: ``https://HOST:PORT``
    region: str
    of_aws: bool  #: no other endpoint was named, here or in the environment
    credentials: Boto3CredentialProvider = attrs.field(repr=False)
    ca: Path | None  #: certificates to trust, besides the system's

    @classmethod
    def find(cls, *, profile: str | None, region: str | None, endpoint: str | None, ca: Path | None) -> Account:
        """Raises BackendError if there are no credentials, or if what is configured cannot be used."""
        try:
            session = boto3.Session(profile_name=profile)
            region = region or session.region_name or _REGION
            client = session.client("s3", region_name=region, endpoint_url=endpoint)
            url = client.meta.endpoint_url
            client.close()
            bundle = ca or session._session.get_config_variable("ca_bundle")
            if session.get_credentials() is None:
                raise BackendError(
                    "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
                )
            credentials = Boto3CredentialProvider(session, ttl=_ASK_AGAIN)
        except (BotoCoreError, ValueError) as error:
            raise BackendError(f"the AWS configuration cannot be used: {type(error).__name__}") from None
        return cls(_plain(url), region, ".amazonaws.com" in url, credentials, bundle and Path(bundle))

    @property
    def protects_bytes(self) -> bool:
        """Does TLS protect what is sent, or does it not leave this machine?"""
        return self.url.startswith("https:") or _is_this_machine(urlsplit(self.url).hostname or "")

    def url_of(self, bucket: str) -> str:
        """Where the bucket is, if it is named in the host."""
        scheme, _, host = self.url.partition("://")
        return f"{scheme}://{bucket}.{host}"


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
