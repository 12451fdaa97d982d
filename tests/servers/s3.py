"""An S3 server for tests and benchmarks: moto in a process of its own, on a free port of this machine.

``python -m servers.s3 PORT [CERTIFICATE KEY]`` is that process; it prints a line when it listens. Requests are served
one at a time: moto compares and writes in two steps, and so would let two writers with the same condition both succeed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from needs import needs

from servers.ports import free_port
from servers.stopping import stopped

BUCKET = "kvtier-tests"
#: Of nobody. What the machine is configured with must not decide.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "test-secret-of-nobody",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


#: What a test asks of the process itself.
_FAULTS, _LISTINGS, _ASKED = "/-/faults", "/-/listings", "/-/asked"


class S3Server:
    """A server with one empty bucket, until `close`."""

    def __init__(self, certificate: Path | None = None, key: Path | None = None):
        """With a certificate and its key it speaks TLS."""
        self.port = free_port()
        self._tls = [] if certificate is None else [str(certificate), str(key)]
        self._trust = None if certificate is None else ssl.create_default_context(cafile=certificate)
        self.start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}" if self._tls else f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; the second time on the same port, with nothing in it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "servers.s3", str(self.port), *self._tls],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            text=True,
        )
        self._process.stdout.readline()
        self.make_bucket(BUCKET)

    def make_bucket(self, name: str) -> None:
        self._request("PUT", f"/{name}")

    @contextlib.contextmanager
    def failing(self, match: str, status: int, code: str = "", times: int = 1 << 30) -> Iterator[None]:
        """Answer so many requests whose ``METHOD /path?query`` contains this pattern with an error; 0: with nothing."""
        self._request("POST", _FAULTS, {"match": match, "status": status, "code": code, "times": times})
        try:
            yield
        finally:
            self._request("POST", _FAULTS, {})

    @contextlib.contextmanager
    def silent(self, match: str, times: int = 1 << 30) -> Iterator[None]:
        """Carry out so many requests that contain this pattern, and answer each with 500 all the same."""
        with self.failing(match, 500, "carried out", times):
            yield

    def listings(self) -> int:
        """How often anybody has listed what is there."""
        return int(self._request("GET", _LISTINGS))

    def unfinished_uploads(self) -> int:
        """How many uploads in parts were begun and neither ended nor given up."""
        return self._request("GET", f"/{BUCKET}?uploads").count(b"<UploadId>")

    def asked(self) -> list[str]:
        """Each request since the last time: its method, conditions and first field of the query: ``PUT if-match``."""
        return json.loads(self._request("GET", _ASKED))

    def _request(self, method: str, path: str, fields: object = None) -> bytes:
        body = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, method=method)
        with urllib.request.urlopen(request, context=self._trust) as response:
            return response.read()

    def kill(self) -> None:
        """End it, and everything that it holds."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    close = kill

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """It does nothing until the end of the context, and its connections stay open."""
        return stopped(self._process.pid)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """No AWS setting of this machine, and credentials of nobody; for child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests of a process. A test that stops it goes on with it afterwards."""
    needs("moto's server", find_spec("moto") is not None and find_spec("flask") is not None, "pip install moto[server]")
    with environment(), contextlib.closing(S3Server()) as server:
        yield server


class _Watched:
    """An application that answers one request at a time, counts listings, and fails where a test wants it to."""

    def __init__(self, application: Callable):
        self._application = application
        self._lock = threading.Lock()
        self._fault: dict = {}
        self._listings = 0
        self._asked: list[str] = []

    def __call__(self, environ: dict, start_response: Callable) -> list[bytes]:
        if environ["PATH_INFO"] == _FAULTS:
            self._fault = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            return _say(start_response, b"")
        if environ["PATH_INFO"] == _LISTINGS:
            return _say(start_response, b"%d" % self._listings)
        if environ["PATH_INFO"] == _ASKED:
            asked, self._asked = self._asked, []
            return _say(start_response, json.dumps(asked).encode())
        self._asked.append(_outline(environ))
        self._listings += "list-type=" in environ["QUERY_STRING"]
        answer = self._failure(environ, start_response)
        if answer is not None:
            return answer
        with self._lock:
            return list(self._application(environ, start_response))

    def _failure(self, environ: dict, start_response: Callable) -> list[bytes] | None:
        """None: none is wanted."""
        fault, asked = self._fault, f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        if not fault or not fault["times"] or not re.search(fault["match"], asked):
            return None
        if not fault["status"]:
            while self._fault is fault:
                time.sleep(0.01)
            return None
        fault["times"] -= 1
        if fault["code"] == "carried out":
            with self._lock:
                list(self._application(environ, lambda *_: None))
            return _say(start_response, b"", fault["status"])
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{fault['code']}</Code><Message>of {ENVIRONMENT['AWS_ACCESS_KEY_ID']}</Message></Error>"
        return _say(start_response, b"" if environ["REQUEST_METHOD"] == "HEAD" else body.encode(), fault["status"])


def _outline(environ: dict) -> str:
    conditions = [
        f"if-{how}" for how in ("match", "none-match") if f"HTTP_IF_{how.upper().replace('-', '_')}" in environ
    ]
    return " ".join([environ["REQUEST_METHOD"], *conditions, *environ["QUERY_STRING"].split("=")[:1]]).strip()


def _say(start_response: Callable, body: bytes, status: int = 200) -> list[bytes]:
    start_response(f"{status} Said", [("Content-Length", str(len(body)))])
    return [body]


def _serve(port: int, *tls: str) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = _Watched(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", port, application, threaded=True, ssl_context=tls or None)
    print("listens", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), *sys.argv[2:])
