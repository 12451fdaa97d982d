"""The server that the tests share."""

from servers.s3 import s3_server  # noqa: F401 - a fixture
