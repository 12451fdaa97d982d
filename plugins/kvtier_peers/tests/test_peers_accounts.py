"""Peers on loopback without a token: those of this account are let in, and nobody else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile

import pytest
from nodes import FRAMES, KEYS, finds, open_node, read
from patience import wait_until
from servers.ports import free_port

from kvtier_core.errors import BackendError
from kvtier_testing import Proxy

STRANGER = 65534
REFUSED = "it is not known to belong to this account"
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


def own(node, *args, **settings):
    return node(*args, token=None, **settings)


def must_be_refused(node, peer):
    wait_until(lambda: node.facts().get(peer, "").startswith(REFUSED) or finds(node, KEYS[0]))
    assert not finds(node, KEYS[0])


@contextlib.contextmanager
def another_account(frames, **settings):
    """A node of another account, in a process of its own. Yields what it says, a line each."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _be_another_account(writer, frames, settings)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with open(reader) as said:
            yield said
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_another_account(writer, frames, settings):
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        node = open_node(frames, token=None, **settings)
        shutil.rmtree(runtime)
        for peer in settings.get("peers", ()):
            must_be_refused(node, peer)
            os.write(writer, b"is refused\n")
        os.write(writer, b"listens\n")
        signal.pause()


def test_nodes_of_an_account_read_from_each_other(node):
    first = own(node, FRAMES)
    second = own(node, peers=[first.address])
    wait_until(lambda: finds(second, *KEYS))
    assert read(second, KEYS) == [FRAMES[key] for key in KEYS]


@only_root
def test_another_account_that_listens_where_a_peer_did_feeds_no_one(node):
    address = f"127.0.0.1:{free_port()}"
    with another_account(FRAMES, listen=address) as said:
        assert said.readline() == "listens\n"
        reader = own(node, peers=[address])
        must_be_refused(reader, address)
        assert read(reader, KEYS[:1]) == [b""]


@only_root
def test_another_account_is_shown_nothing(node):
    owner = own(node, FRAMES)
    with another_account({}, peers=[owner.address]) as said:
        assert said.readline() == "is refused\n"
    second = own(node, peers=[owner.address])
    wait_until(lambda: finds(second, *KEYS))


def test_who_stands_between_two_nodes_of_an_account_cannot_pass_their_proofs_on(node):
    """As another account could that listens where a peer did. With a token whoever carries the bytes is trusted."""
    owner = own(node, FRAMES)
    with Proxy(("127.0.0.1", int(owner.address.rpartition(":")[2]))) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        reader = own(node, peers=[address])
        must_be_refused(reader, address)


def test_an_account_without_a_folder_of_its_own_is_told_to_use_a_token(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("no folder")
    (tmp_path / f"kvtier-{os.geteuid()}").write_text("no folder")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(BackendError, match='cannot be created.*; or write token: "env:NAME" for each peer'):
        open_node(token=None)
