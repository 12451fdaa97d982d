"""The laws against an S3 server that shares no code with the other tests' one: s3rver, in JavaScript."""

import contextlib
import hashlib
import shutil
import socket
import subprocess
import time
from typing import ClassVar

import pytest
from patience import HANG
from servers.ports import free_port
from servers.s3 import BUCKET, environment

from kvtier_s3.config import S3Config
from kvtier_testing import SharedBackendLaws


@contextlib.contextmanager
def _running(folder):
    """Its port. It knows no conditional writes, so every put replaces what is there."""
    port = free_port()
    words = ["s3rver", "--directory", folder, "--address", "127.0.0.1", "--port", str(port)]
    words += ["--configure-bucket", BUCKET, "--no-vhost-buckets", "--silent"]
    with subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield port
        finally:
            process.kill()


def _wait_for(port):
    deadline = time.monotonic() + HANG
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, "s3rver does not start"
        time.sleep(0.05)


_IN_PLACE = "s3rver writes objects in place, so that a reader sees a part of one that is being put; S3 does not"


@pytest.mark.more
@pytest.mark.long
class TestS3rver(SharedBackendLaws):
    persistent = True
    excused: ClassVar = dict.fromkeys(
        (
            "test_two_writers_of_one_key_leave_a_whole_frame",
            "test_a_read_races_with_overwrites_and_deletes",
            "test_a_killed_writer_harms_no_other",
        ),
        _IN_PLACE,
    )

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls, tmp_path_factory):
        if shutil.which("s3rver") is None:
            pytest.skip("s3rver is not installed: npm install --global s3rver")
        with environment(), pytest.MonkeyPatch.context() as patch, _running(tmp_path_factory.mktemp("s3rver")) as port:
            patch.setenv("AWS_ACCESS_KEY_ID", "S3RVER")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "S3RVER")
            cls.endpoint = f"http://127.0.0.1:{port}"
            yield

    def config(self, folder):
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        return S3Config(bucket=BUCKET, prefix=f"laws/{prefix}", endpoint=self.endpoint)

    def context(self, model="tiny", capacity=0):
        """Without conditional writes engines cannot count together."""
        return super().context(model, 0)
