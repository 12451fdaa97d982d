"""Nodes that are closed when a test ends, and a network between them."""

from __future__ import annotations

import contextlib

import pytest
from nodes import FRAMES, open_node
from servers.redis import make_certificate

from kvtier_testing import Proxy


@pytest.fixture
def secured(request, tmp_path):
    """Settings of all nodes of a test: a token alone, or with ``TLS`` as its parameter that, too."""
    if getattr(request, "param", "") != "TLS":
        return {}
    make_certificate(tmp_path)
    return {"ca": tmp_path / "ca.pem", "cert": tmp_path / "ca.pem", "key": tmp_path / "key.pem"}


@pytest.fixture
def node(secured):
    """Opens nodes that are closed when the test ends."""
    with contextlib.ExitStack() as closing:

        def node(*args, **settings):
            opened = open_node(*args, **{**secured, **settings})
            closing.callback(opened.close)
            return opened

        yield node


@pytest.fixture
def behind(node):
    """A node that shows all frames, and a network in front of it."""
    first = node(FRAMES)
    with Proxy(("127.0.0.1", int(first.address.rpartition(":")[2]))) as proxy:
        yield f"127.0.0.1:{proxy.port}", proxy
