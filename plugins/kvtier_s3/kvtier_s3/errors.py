"""What the store's refusals mean. Of its words only the code is repeated: the others may quote what signs a request."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtier_core.errors import BackendError, StoreFull
from kvtier_s3.http import Response


class StoreDown(BackendError):
    """Not about one key: whatever else were asked of the store would fail alike."""


class Untrusted(StoreDown):
    """The store's certificate is not to be trusted. That does not pass."""


_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_FULL = {"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "EntityQuotaExceeded"}
_SLOW_DOWN = {"SlowDown", "SlowDownRead", "SlowDownWrite", "RequestLimitExceeded", "Throttling", "TooManyRequests"}
_REASONS = {
    "AccessDenied": "these credentials may not do this; the README lists the permissions that are needed",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set `region`",
    "ExpiredToken": "the credentials have expired",
    "InvalidAccessKeyId": "the store does not know these credentials",
    "InvalidToken": "the store does not know these credentials",
    "NoSuchBucket": "there is no such bucket",
    "PermanentRedirect": "the bucket is in another region; set `region`",
    "RequestTimeTooSkewed": "the clock of this machine and that of the store differ",
    "SignatureDoesNotMatch": "the secret key is wrong",
}
#: Where a response has no body to say more.
_OF_STATUS = {301: "PermanentRedirect", 403: "AccessDenied"}
_OF_ONE_KEY = {404, 405, 409, 412, 416}


def code_of(response: Response) -> str:
    """The word by which S3 names an error; empty if there is none."""
    found = _CODE.search(response.body)
    return found[1].decode() if found else ""


def error_of(response: Response, where: str, nbytes: int = 0) -> BackendError:
    """What a response that is no success means. ``where`` names the bucket; ``nbytes`` were to be written."""
    code = code_of(response) or _OF_STATUS.get(response.status, "")
    said = f"{where}: {' '.join(filter(None, [str(response.status), code]))}"
    said = f"{said}: {_REASONS[code]}" if code in _REASONS else said
    region = response.headers.get("x-amz-bucket-region", "")
    if code in ("AuthorizationHeaderMalformed", "PermanentRedirect") and re.fullmatch(r"[a-z0-9-]{1,32}", region):
        said = f"{said} to {region}"
    if response.status == 507 or code in _FULL:
        return StoreFull(f"{where}: the store is full", missing=nbytes)
    if response.status == 429 or code in _SLOW_DOWN:
        return BackendError(f"{said}: the store asks to slow down")
    if response.status in _OF_ONE_KEY and code not in _REASONS:
        return BackendError(said)
    return StoreDown(said)


def raise_if_store_is_down(failures: Iterable[BackendError | None]) -> None:
    """Raise if every key failed, and none for a reason of its own."""
    failures = list(failures)
    if failures and all(isinstance(failure, StoreDown) for failure in failures):
        raise failures[0]
