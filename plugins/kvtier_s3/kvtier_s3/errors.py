"""The meaning of obstore's errors. Only the code in their text is repeated: the rest may quote what signs a request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from obstore.exceptions import InvalidPathError, UnauthenticatedError

from kvtier_core.errors import BackendError, StoreFull


class Absent(BackendError):
    """There is no such object, or nothing in it."""


class Conflict(BackendError):
    """A condition of the request does not hold."""


class NoConditions(BackendError):
    """The store has no conditional writes."""


class StoreDown(BackendError):
    """Not about one key: any other request to the store would fail, too."""


class Unanswered(StoreDown):
    """The store does not answer, or reports that it cannot work now. That may pass."""


_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_CERTIFICATE = re.compile(r"invalid peer certificate|InvalidCertificate")
#: The fate of a connection: the system's words, or else obstore's.
_BROKEN = (re.compile(r'message: "([A-Z][a-z ]{1,40})"'), re.compile(r"HttpError \{\s*kind: ([A-Za-z]+)"))
_FULL = {"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "EntityQuotaExceeded"}
_SLOW_DOWN = {"SlowDown", "SlowDownRead", "SlowDownWrite", "RequestLimitExceeded", "Throttling", "TooManyRequests"}
_REASONS = {
    "AccessDenied": "these credentials lack a permission; see the README for those that are needed",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set `region`",
    "ExpiredToken": "the credentials have expired",
    "InvalidAccessKeyId": "the store does not know these credentials",
    "InvalidToken": "the store does not know these credentials",
    "NoSuchBucket": "no such bucket",
    "PermanentRedirect": "the bucket is in another region; set `region`",
    "RequestTimeTooSkewed": "the clock of this machine and that of the store differ",
    "SignatureDoesNotMatch": "the secret key is wrong",
}
#: The code for a status whose response has no body.
_OF_STATUS = {301: "PermanentRedirect", 403: "AccessDenied"}
_OF_ONE_KEY = {404: Absent, 405: BackendError, 409: Conflict, 412: Conflict, 416: Absent, 501: NoConditions}


def error_of(error: Exception, where: str, nbytes: int = 0) -> BackendError:
    """The meaning of an error of obstore. ``where`` names the bucket; ``nbytes`` were to be written."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status or code:
        return _refusal(int(status[1]) if status else 500, code[1] if code else "", where, nbytes)
    if isinstance(error, UnauthenticatedError):
        return StoreDown(f"{where}: the credentials cannot be refreshed")
    if isinstance(error, InvalidPathError):
        return BackendError(f"{where}: an object with an odd name, like `a//b`, makes the listing fail")
    if _CERTIFICATE.search(text):
        return StoreDown(f"{where}: the store's certificate is not trusted; set `ca`")
    if "BareRedirect" in text:
        return StoreDown(f"{where}: {_REASONS['PermanentRedirect']}")
    if "HttpError" not in text:
        return BackendError(f"{where}: the store did not return what was requested")
    told = [found[1] for found in (words.search(text) for words in _BROKEN) if found]
    return Unanswered(f"{where}: no answer{f': {told[0]}' if told else ''}")


def _refusal(status: int, code: str, where: str, nbytes: int) -> BackendError:
    code = code or _OF_STATUS.get(status, "")
    said = f"{where}: {' '.join(filter(None, [str(status), code]))}"
    if status == 507 or code in _FULL:
        return StoreFull(f"{where}: the store is full", missing=nbytes)
    if status == 429 or code in _SLOW_DOWN:
        return Unanswered(f"{said}: the store asks to slow down")
    if code in _REASONS:
        return StoreDown(f"{said}: {_REASONS[code]}")
    if status in _OF_ONE_KEY or code == "NotImplemented":
        return _OF_ONE_KEY.get(status, NoConditions)(said)
    return Unanswered(said) if status >= 500 else StoreDown(said)


def raise_if_store_is_down(outcomes: Sequence[object]) -> None:
    """Raise if every key failed, and none for a reason of its own."""
    down = [outcome for outcome in outcomes if isinstance(outcome, StoreDown)]
    if down and len(down) == len(outcomes):
        raise down[0]
