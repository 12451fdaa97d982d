"""Which client may ask what over HTTP. On a Unix socket the kernel names it; over TCP it has a token, on loopback too.

There is one app for operators, one for readers, and one for strangers: what is in none of them cannot be asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import socket
import time
from typing import NamedTuple
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier_core.errors import ContractError
from kvtier_core.storekit.user_folders import user_secret
from kvtier_core.telemetry.log_limit import LogLimit

#: The environment variables with the token for everything, and with the one for what changes nothing.
TOKEN, READ_TOKEN = "KVTIER_HTTP_TOKEN", "KVTIER_HTTP_READ_TOKEN"
#: The name of the secret that is the token on loopback if there is no other.
_SECRET = "operators"
#: Addresses that stand for all of this machine's.
_EVERY = ("0.0.0.0", "::")
_CLOSE = (b"connection", b"close")
#: After the name in a Host header.
_PORT = re.compile(r":\d*$")


class Apps(NamedTuple):
    """The apps, by who may ask them."""

    operators: ASGIApp
    readers: ASGIApp
    strangers: ASGIApp


def token_of(host: str, *, make: bool = True) -> str:
    """The token for everything at this address.

    Raises ContractError if other machines reach it and no token is set; OSError and BackendError if this user's own is
    not available.
    """
    if token := os.environ.get(TOKEN, ""):
        return token
    if not is_loopback(host):
        raise ContractError(f"{host} is reachable from other machines: set the environment variable {TOKEN}")
    return user_secret(_SECRET, make=make)


def link(host: str, port: int, is_encrypted: bool) -> str:
    """The URL of the page there, for a browser; everything after the # is hidden from servers and proxies."""
    name = socket.gethostname() if host in _EVERY else f"[{host}]" if ":" in host else host
    return f"http{'s' if is_encrypted else ''}://{name}:{port}/#{quote(token_of(host), safe='')}"


class Gate:
    """An app that lets each client ask what its token allows. Only operators may ask twice on one connection."""

    def __init__(self, host: str, apps: Apps, *, make: bool = True):
        """``host`` is the address at which it is reached. ``make``: see `user_secret`. Raises as `token_of` does."""
        self._apps = apps
        self._tokens = [(token_of(host, make=make), apps.operators), (os.environ.get(READ_TOKEN, ""), apps.readers)]
        self._is_on_loopback = is_loopback(host)
        self._log = LogLimit(time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI defines it."""
        app = self._app_of(scope)
        await app(scope, receive, send if app is self._apps.operators else _closing(send))

    def _app_of(self, scope: Scope) -> ASGIApp:
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if given and kind.lower() == "bearer":
            for token, app in self._tokens:
                if token and hmac.compare_digest(given.strip().encode("latin-1"), token.encode()):
                    return app
            self._log.log(logging.WARNING, "operators", (scope["client"] or ("", 0))[0], "a wrong token")
        name = _PORT.sub("", headers.get("host", "localhost")).strip("[]")
        if self._is_on_loopback and not is_loopback(name):
            return _OF_ANOTHER_SITE
        return self._apps.strangers


#: The answer to a page of another site, under a name that leads here.
_OF_ANOTHER_SITE = JSONResponse({"error": "write the address as 127.0.0.1 or localhost"}, 403)


def _closing(send: Send) -> Send:
    """Ends the connection with the answer, even if part of the request has not been read."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], _CLOSE]
        await send(message)

    return closing


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
