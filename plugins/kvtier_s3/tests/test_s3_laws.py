"""A bucket keeps the laws of shared backends, whatever happens to an object in it."""

import contextlib
import hashlib

import pytest
from servers.s3 import BUCKET

from kvtier_core.types import Seconds
from kvtier_s3.config import S3Config
from kvtier_s3.names import Names
from kvtier_s3.opening import connect
from kvtier_testing import SharedBackendLaws
from kvtier_testing.samples import make_namespace


@pytest.mark.more
class TestS3(SharedBackendLaws):
    persistent = True
    bounded = True
    scan_tick = 1.1  # listings tell the second of a write

    @pytest.fixture(autouse=True)
    def _serve(self, s3_server):
        type(self).server = s3_server

    def config(self, folder):
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        return S3Config(bucket=BUCKET, prefix=f"laws/{prefix}", endpoint=self.server.url)

    def spoil(self, folder, key):
        """Other bytes of the same length, which look as before to whoever does not read them."""
        config = self.config(folder)
        name = Names.of(config.prefix, make_namespace()).frame(key)
        bucket, _ = connect(config, Seconds(60))
        before = bucket.calls.one(bucket.head, name)
        bucket.calls.one(bucket.put, name, bytes(before.nbytes), meta=before.meta)
        bucket.calls.close()
        return True

    @contextlib.contextmanager
    def stalled(self, folder, key):
        with self.server.failing(f"GET .*{key.hex()}", status=0):
            yield True

    @contextlib.contextmanager
    def stalled_store(self, folder):
        with self.server.stopped():
            yield True

    @contextlib.contextmanager
    def interrupted(self, folder):
        with self.server.failing("kvtier", status=503, code="ServiceUnavailable"):
            yield True

    def listings(self, folder):
        return self.server.listings()
