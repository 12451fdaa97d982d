"""A process that ends right after its tier was closed."""

import os
import subprocess
import sys

from servers.s3 import BUCKET, ENVIRONMENT

#: The thread that wakes the loop comes back from that while the interpreter ends, as on a busy machine.
SCRIPT = """
import sys, time
from asyncio.selector_events import BaseSelectorEventLoop

from kvtier_core.types import Seconds
from kvtier_s3.config import S3Config
from kvtier_testing.samples import make_context, make_keys


class Lasting:
    def __del__(self, sleep=time.sleep):
        sleep(1)


sys.lasting = Lasting()  # until the very end
wake = BaseSelectorEventLoop._write_to_self
BaseSelectorEventLoop._write_to_self = lambda loop: (wake(loop), time.sleep(0.2))
backend = S3Config(bucket=sys.argv[1], endpoint=sys.argv[2]).open(make_context())
backend.contains(make_keys(1))
backend.close()
"""


def test_no_thread_of_the_client_aborts_a_process_that_ends(s3_server):
    command = [sys.executable, "-c", SCRIPT, BUCKET, s3_server.url]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
