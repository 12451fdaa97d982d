"""A bucket keeps the laws of shared backends: with small frames, and with frames in several parts."""

import hashlib

import pytest
from servers.s3 import BUCKET

from kvtier_core.testing import SharedBackendLaws
from kvtier_s3.config import S3Config


class TestS3(SharedBackendLaws):
    persistent = True
    scan_tick = 1.1  # listings tell the second of a write

    @pytest.fixture(autouse=True)
    def _serve(self, s3_server):
        type(self).endpoint = s3_server.url

    def config(self, folder):
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        return S3Config(bucket=BUCKET, prefix=f"laws/{prefix}", endpoint=self.endpoint)
