"""An S3 server for tests and benchmarks: moto in a process of its own, on a free port of this machine.

``python -m servers.s3`` is that process. It prints its port. Requests are served one at a time: moto compares and
writes in two steps, and so would let two writers with the same condition both succeed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

BUCKET = "kvtier-tests"
#: Of nobody. What the machine is configured with must not decide.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "test-secret-of-nobody",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """A server with one empty bucket, until `close`."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; the second time on the same port, with nothing in it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "servers.s3", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            text=True,
        )
        self.port = int(self._process.stdout.readline())
        self.make_bucket(BUCKET)

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        urllib.request.urlopen(request).close()

    def kill(self) -> None:
        """End it, and everything that it holds."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    close = kill

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It answers nothing meanwhile, and its connections stay."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """No AWS setting of this machine, and credentials of nobody; for child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def needs(what: str, there: bool, way: str) -> None:
    """Skip the test if something it needs is not there; where nothing may be skipped, fail."""
    if there:
        return
    sentence = f"{what} is not installed; {way}"
    if os.environ.get("KVTIER_CI"):
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests of a process. A test that stops it goes on with it afterwards."""
    needs("moto's server", find_spec("moto") is not None and find_spec("flask") is not None, "pip install moto[server]")
    with environment(), contextlib.closing(S3Server()) as server:
        yield server


def _serve(port: int) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    dispatcher, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_at_a_time(environ, start_response):
        with lock:
            return list(dispatcher(environ, start_response))

    server = make_server("127.0.0.1", port, one_at_a_time, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
