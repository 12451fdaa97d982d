"""The server that the tests share, and backends that use it."""

import contextlib
import hashlib

import attrs
import pytest
from servers.s3 import BUCKET, s3_server  # noqa: F401 - a fixture

from kvtier_core.types import Nbytes, Seconds
from kvtier_s3.config import S3Config
from kvtier_testing.samples import make_context


@pytest.fixture
def config(s3_server, tmp_path):  # noqa: F811
    """Below a prefix of this test's own."""
    prefix = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    return S3Config(bucket=BUCKET, prefix=prefix, endpoint=s3_server.url, part=Nbytes(5 << 20))


@pytest.fixture
def open_s3(config):
    """Opens users of the bucket, which are closed in the end."""
    with contextlib.ExitStack() as closing:

        def open_s3(*, capacity=0, timeout=60.0, namespace=None, **settings):
            ctx = attrs.evolve(make_context(capacity=capacity, namespace=namespace), timeout=Seconds(timeout))
            return closing.enter_context(contextlib.closing(attrs.evolve(config, **settings).open(ctx)))

        yield open_s3


@pytest.fixture
def backend(open_s3):
    return open_s3()


@pytest.fixture
def bucket(config):
    """The same bucket, as the tests look at it."""
    from kvtier_s3.opening import connect

    bucket, _ = connect(config, Seconds(60))
    with bucket.calls.within(60):
        yield bucket
    bucket.calls.close()


@pytest.fixture
def asked(s3_server):  # noqa: F811
    """The requests that arrived since the test began, or since it asked: ``PUT if-none-match``."""
    s3_server.asked()
    return s3_server.asked
