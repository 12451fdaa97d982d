"""A bucket: what can be asked of it, and what its answers mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import attrs

from kvtier_core.errors import BackendError
from kvtier_s3.client import Client
from kvtier_s3.errors import StoreDown, code_of, error_of
from kvtier_s3.http import Request, Response

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
#: Listings under way at a time; a page of one is up to half a megabyte.
_LISTED_AT_ONCE = 16


@attrs.frozen
class Span:
    """A part of an object, and how long the object is."""

    begin: int
    nbytes: int
    total: int


@attrs.frozen
class Listed:
    """An object in a listing."""

    name: str
    nbytes: int
    modified: str  #: when, in UTC, so that later is greater
    etag: str


@attrs.frozen
class Bucket:
    """Makes requests and reads answers. May be used on several threads."""

    name: str
    client: Client
    base: str  #: of paths: empty if the bucket is named in the host
    on_write: Mapping[str, str] = attrs.field(factory=dict)  #: headers that ask the store to encrypt

    @property
    def where(self) -> str:
        """For people."""
        return f"s3://{self.name}"

    # -- requests ----------------------------------------------------------------------------------

    def get(
        self, name: str, into: memoryview | None = None, *, begin: int = 0, nbytes: int | None = None, etag: str = ""
    ) -> Request:
        """Read an object, or ``nbytes`` of it from ``begin`` on; only if it is still the version with this ETag."""
        headers = {"range": f"bytes={begin}-{begin + nbytes - 1}"} if nbytes is not None else {}
        return Request("GET", self._path(name), headers=headers | ({"if-match": etag} if etag else {}), into=into)

    def put(
        self,
        name: str,
        body: bytes | memoryview,
        *,
        new: bool = False,
        etag: str = "",
        meta: Mapping[str, str] | None = None,
    ) -> Request:
        """Write an object in one request: ``new`` only where there is none, ``etag`` only in place of that version."""
        condition = {"if-none-match": "*"} if new else {"if-match": etag} if etag else {}
        return Request("PUT", self._path(name), headers={**self.on_write, **condition, **(meta or {})}, body=body)

    def head(self, name: str = "") -> Request:
        """Look at an object, or at the bucket."""
        return Request("HEAD", self._path(name))

    def delete(self, name: str) -> Request:
        return Request("DELETE", self._path(name))

    def begin_upload(self, name: str, meta: Mapping[str, str]) -> Request:
        """Begin to write an object in parts."""
        return Request("POST", self._path(name), "uploads=", headers={**self.on_write, **meta})

    def upload(self, name: str, upload: str, part: int, body: memoryview) -> Request:
        """Write a part, numbered from 1."""
        return Request("PUT", self._path(name), _query(partNumber=str(part), uploadId=upload), body=body)

    def end_upload(self, name: str, upload: str, etags: Sequence[str]) -> Request:
        """Make an object of the parts with these ETags."""
        parts = "".join(
            f"<Part><PartNumber>{part}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for part, etag in enumerate(etags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        return Request("POST", self._path(name), _query(uploadId=upload), body=body)

    def abort_upload(self, name: str, upload: str) -> Request:
        return Request("DELETE", self._path(name), _query(uploadId=upload))

    # -- answers -----------------------------------------------------------------------------------

    def exchange(self, requests: Sequence[Request]) -> list[Response | StoreDown]:
        """As `Client.exchange`."""
        return self.client.exchange(requests)

    def ask(self, request: Request) -> Response:
        """The response to one request. Raises BackendError if there is none."""
        (answer,) = self.exchange([request])
        if isinstance(answer, StoreDown):
            raise answer
        return answer

    def failure(self, answer: Response | StoreDown, nbytes: int = 0) -> BackendError | None:
        """Why the request did not succeed; None if it did. ``nbytes`` were to be written."""
        if isinstance(answer, StoreDown):
            return answer
        return None if answer.status in (200, 204, 206) else error_of(answer, self.where, nbytes)

    def must(self, request: Request) -> Response:
        """The response to one request that succeeds. Raises BackendError, Conflict if a condition does not hold."""
        response = self.ask(request)
        failure = self.failure(response)
        if failure is not None:
            raise failure
        return response

    def fetch(self, name: str) -> Response | None:
        """A small object with its ETag; None if there is none. Raises BackendError."""
        response = self.ask(self.get(name))
        if absent(response):
            return None
        failure = self.failure(response)
        if failure is not None:
            raise failure
        return response

    def list(self, prefixes: Iterable[str]) -> Iterator[Listed]:
        """All objects whose names begin with one of the prefixes, in no order. Raises BackendError."""
        pages = [(prefix, "") for prefix in prefixes]
        while pages:
            now, pages = pages[:_LISTED_AT_ONCE], pages[_LISTED_AT_ONCE:]
            answers = self.exchange([self._page(prefix, after) for prefix, after in now])
            for (prefix, _), answer in zip(now, answers, strict=True):
                page = self._read_page(answer)
                yield from _objects(page)
                if after := _next(page):
                    pages.append((prefix, after))

    def folders(self, prefix: str) -> list[str]:
        """The names between ``prefix`` and the next slash. Raises BackendError."""
        page = self._read_page(self.ask(self._page(prefix, "", delimiter="/")))
        names = [_text(each, "Prefix") for each in page.iterfind("{*}CommonPrefixes")]
        while after := _next(page):
            page = self._read_page(self.ask(self._page(prefix, after, delimiter="/")))
            names += [_text(each, "Prefix") for each in page.iterfind("{*}CommonPrefixes")]
        return [unquote(name).removeprefix(prefix).rstrip("/") for name in names]

    def _page(self, prefix: str, after: str, **more: str) -> Request:
        more |= {"continuation-token": after} if after else {}
        query = _query(**{"list-type": "2", "encoding-type": "url", "prefix": prefix}, **more)
        return Request("GET", self._path(""), query)

    def _read_page(self, answer: Response | StoreDown) -> ElementTree.Element:
        failure = self.failure(answer)
        if failure is not None:
            raise failure
        try:
            return ElementTree.fromstring(answer.body)
        except ElementTree.ParseError:
            raise StoreDown(f"{self.where}: a listing that cannot be read") from None

    def _path(self, name: str) -> str:
        return f"{self.base}/{quote(name, safe='/-_.~')}"


def absent(response: Response) -> bool:
    """Does it say that there is no such object, in a bucket that is there?"""
    return response.status == 404 and code_of(response) != "NoSuchBucket"


def span_of(response: Response) -> Span | None:
    """What a ranged read returned; None if the response does not say."""
    found = _RANGE.fullmatch(response.headers.get("content-range", ""))
    if response.status != 206 or found is None:
        return None
    begin, last, total = map(int, found.groups())
    return Span(begin, last - begin + 1, total)


def xml_text(response: Response, tag: str) -> str:
    """The text of an element of the response's body; empty if there is none."""
    try:
        return _text(ElementTree.fromstring(response.body), tag)
    except ElementTree.ParseError:
        return ""


def _objects(page: ElementTree.Element) -> Iterator[Listed]:
    for each in page.iterfind("{*}Contents"):
        name, size = unquote(_text(each, "Key")), _text(each, "Size")
        if name and size.isdecimal():
            yield Listed(name, int(size), _text(each, "LastModified"), _text(each, "ETag"))


def _next(page: ElementTree.Element) -> str:
    """Where the next page begins; empty after the last one."""
    return _text(page, "NextContinuationToken") if _text(page, "IsTruncated") == "true" else ""


def _text(element: ElementTree.Element, tag: str) -> str:
    return element.findtext(f"{{*}}{tag}") or ""


def _query(**fields: str) -> str:
    """Quoted and sorted as signatures need it."""
    return urlencode(sorted(fields.items()), quote_via=quote, safe="-_.~")
