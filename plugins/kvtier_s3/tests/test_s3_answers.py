"""Servers that answer with garbage, too slowly, or as somebody else."""

import contextlib
import datetime
import ipaddress
import socket
import threading

import attrs
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from patience import HANG
from servers.s3 import S3Server

from kvtier_core.errors import BackendError
from kvtier_core.types import FRAME_ALIGNMENT, Seconds
from kvtier_testing.samples import Poisoned, make_context, make_frame, make_key, same

KEY = make_key(0)
FRAME = make_frame(KEY, nbytes=2 * FRAME_ALIGNMENT)


class FakeServer:
    """Accepts connections, and on each answers every request with the same bytes, a bit at a time if asked to."""

    def __init__(self, answer, *, keep=True, piece=None):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.answer, self._keep, self._piece = answer, keep, piece
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
                self._threads[-1].start()

    def _serve(self, peer):
        peer.settimeout(0.05)
        with peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    if not peer.recv(1 << 20):
                        return
                    self._say(peer)
                    if not self._keep:
                        return

    def _say(self, peer):
        piece = self._piece or len(self.answer) or 1
        for at in range(0, len(self.answer), piece):
            if self._ended.wait(0.02 if self._piece else 0):
                return
            peer.sendall(self.answer[at : at + piece])

    def close(self):
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def serve(s3_server, config):
    """A backend that asks a server which answers everything with these bytes."""
    with contextlib.ExitStack() as closing:

        def serve(answer, timeout=0.7, **how):
            server = closing.enter_context(contextlib.closing(FakeServer(b"HTTP/1.1 500 No\r\n\r\n", keep=False)))
            ctx = attrs.evolve(make_context(capacity=0), timeout=Seconds(timeout))
            backend = attrs.evolve(config, endpoint=f"http://127.0.0.1:{server.port}").open(ctx)
            server.answer, server._keep, server._piece = answer, how.get("keep", True), how.get("piece")
            return closing.enter_context(contextlib.closing(backend))

        yield serve


def body(nbytes, *, announced=None, extra=""):
    announced = nbytes if announced is None else announced
    return f"HTTP/1.1 200 OK\r\nContent-Length: {announced}\r\n{extra}\r\n".encode() + bytes(nbytes)


GARBAGE = {
    "nothing": b"",
    "not HTTP": b"220 mail.example.org ESMTP\r\n\r\n",
    "random bytes": bytes(range(256)) * 4,
    "no end of the head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000,
    "no length": b"HTTP/1.1 200 OK\r\n\r\n",
    "no number": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "too short": body(FRAME_ALIGNMENT, announced=2 * FRAME_ALIGNMENT),
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "closed"])
@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_an_error_in_time_and_stays_in_its_view(serve, answer, keep):
    backend, room = serve(answer, keep=keep), Poisoned(2 * FRAME_ALIGNMENT)
    with pytest.raises(BackendError):
        (outcome,) = backend.read([KEY], [room.view])
        raise outcome  # an error of this key alone is returned
    assert room.untouched_beyond(2 * FRAME_ALIGNMENT)


def test_an_answer_that_trickles_has_no_more_time_than_others(serve):
    """Each byte comes soon after the one before."""
    backend = serve(body(2 * FRAME_ALIGNMENT), piece=1)
    with pytest.raises(BackendError, match="no answer"):
        backend.read([KEY], [Poisoned(2 * FRAME_ALIGNMENT).view])


def test_an_object_that_does_not_fit_touches_nothing(serve):
    room = Poisoned(FRAME_ALIGNMENT)
    assert list(serve(body(2 * FRAME_ALIGNMENT), timeout=HANG).read([KEY], [room.view])) == [0]
    assert room.untouched_beyond(0)


def test_other_ranges_than_asked_for_are_refused(serve, config):
    """A server that does not know them sends the whole object, or another part of it."""
    room = Poisoned(2 * config.part)
    for extra in ("", "Content-Range: bytes 1-4096/8192\r\n", "Content-Range: bytes 0-4095/8192\r\n"):
        answer = body(FRAME_ALIGNMENT, extra=f"{extra}ETag: x\r\n").replace(b"200 OK", b"206 Partial Content")
        (outcome,) = serve(answer).read([KEY], [room.view])
        assert isinstance(outcome, BackendError)


@pytest.mark.parametrize("listing", [b"<ListBucketResult>", b"", b"\xff\xfe", b"<a>" * 100000])
def test_a_listing_that_cannot_be_read_is_an_error(serve, listing):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(listing)
    with pytest.raises(BackendError):
        list(serve(answer + listing).namespaces())


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files with a certificate of ``localhost`` that signs itself, and with its key."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = (
        made.serial_number(1).not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    )
    made = made.add_extension(x509.SubjectAlternativeName(names), False)
    made = made.add_extension(x509.BasicConstraints(False, None), True).sign(key, hashes.SHA256())
    (folder / "certificate.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    return folder / "certificate.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def tls_server(s3_server, certificate):
    with contextlib.closing(S3Server(*certificate)) as server:
        yield server


def test_frames_come_back_over_tls(tls_server, certificate, open_s3):
    backend = open_s3(endpoint=tls_server.url, ca=certificate[0])
    assert backend.facts()["unsigned"] == "auto -> on"
    frames = [FRAME, make_frame(make_key(1), nbytes=12 << 20)]
    backend.write([KEY, make_key(1)], frames)
    for _ in range(3):
        views = [memoryview(bytearray(13 << 20)) for _ in frames]
        assert list(backend.read([KEY, make_key(1)], views)) == [len(each) for each in frames]
        assert same([view[: len(frame)] for view, frame in zip(views, frames, strict=True)], frames)


def test_a_certificate_of_another_host_is_refused(tls_server, open_s3):
    with pytest.raises(BackendError, match="certificate is not trusted"):
        open_s3(endpoint=tls_server.url)


def test_an_invalid_certificate_is_reported(tls_server, open_s3, tmp_path):
    for ca in (tmp_path / "nothing.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").write_text("empty")
        with pytest.raises(BackendError, match=ca.name):
            open_s3(endpoint=tls_server.url, ca=ca)
