"""Stores in trouble: what fails is a BackendError, within the timeout, and trouble ends."""

import contextlib
import re

import pytest
from patience import answered, wait_until
from servers.s3 import BUCKET, ENVIRONMENT, S3Server

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_frame, make_key, make_keys, same

KEYS = GOOD, BAD, ALSO_GOOD = make_keys(3)
FRAMES = [make_frame(key, nbytes=2 * FRAME_ALIGNMENT) for key in KEYS]
NBYTES = len(FRAMES[0])


@pytest.fixture
def server(s3_server):
    """One that a test may kill."""
    with contextlib.closing(S3Server()) as server:
        yield server


def read(backend, keys=KEYS):
    return list(backend.read(keys, [memoryview(bytearray(NBYTES)) for _ in keys]))


def calls(backend):
    yield lambda: backend.contains(KEYS)
    yield lambda: read(backend)
    yield lambda: backend.write(KEYS, FRAMES)
    yield lambda: backend.delete(KEYS)


@pytest.mark.more
def test_a_store_that_is_gone_raises_and_one_that_is_back_serves(server, open_s3):
    backend = open_s3(endpoint=server.url)
    backend.write(KEYS, FRAMES)
    server.kill()
    for call in calls(backend):
        with pytest.raises(BackendError, match="Connection refused|SendRequest"):
            call()
    server.start()
    assert list(backend.contains(KEYS)) == [False] * 3
    assert backend.write(KEYS, FRAMES) is None
    assert read(backend) == [NBYTES] * 3


def test_a_store_that_is_not_there_yet_stops_no_engine(server, open_s3):
    server.kill()
    backend = open_s3(endpoint=server.url)
    assert "not reached" in backend.facts()["store"]
    server.start()
    backend.write(KEYS, FRAMES)
    assert read(backend) == [NBYTES] * 3


def test_a_store_that_hangs_is_given_up_when_the_time_is_up(server, open_s3):
    backend = open_s3(endpoint=server.url, timeout=0.5)
    answered(lambda: backend.write(KEYS, FRAMES))
    with server.stopped():
        for call in calls(backend):
            with pytest.raises(BackendError, match="no answer"):  # in time, or as the client's own timeout says it
                call()
    assert (
        answered(lambda: backend.write(KEYS, FRAMES)) is None
    )  # what was asked of it meanwhile it may have done since
    assert read(open_s3(endpoint=server.url)) == [NBYTES] * 3


def test_one_key_that_hangs_is_its_own_failure(s3_server, open_s3):
    backend = open_s3(timeout=0.5)
    answered(lambda: backend.write(KEYS, FRAMES))
    with s3_server.failing(BAD.hex(), 0):
        _, hung, _ = wait_until(lambda: (found := read(backend)) and found[::2] == [NBYTES] * 2 and found)
        assert isinstance(hung, BackendError)
        assert list(answered(lambda: backend.contains(KEYS))) == [True, False, True]


@pytest.mark.parametrize("status, code", [(503, "SlowDown"), (500, "InternalError"), (403, "AccessDenied")])
def test_one_key_that_fails_fails_itself(s3_server, backend, status, code):
    backend.write([GOOD, ALSO_GOOD], [FRAMES[0], FRAMES[2]])
    with s3_server.failing(BAD.hex(), status, code):
        outcomes = backend.write(KEYS, FRAMES)
        assert [type(each) for each in outcomes][::2] == [type(None)] * 2
        assert code in str(outcomes[1])
        first, failed, last = read(backend)
        assert (first, last) == (NBYTES, NBYTES) and code in str(failed)
        assert list(backend.contains(KEYS)) == [True, False, True]


@pytest.mark.parametrize("status, code", [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")])
def test_short_trouble_is_not_reported(s3_server, backend, status, code):
    with s3_server.failing("PUT", status, code, times=3):
        assert backend.write(KEYS, FRAMES) is None
    with s3_server.failing("GET", status, code, times=3):
        assert read(backend) == [NBYTES] * 3


@pytest.mark.parametrize("status, code", [(503, "SlowDown"), (503, ""), (429, "TooManyRequests"), (429, "")])
def test_a_store_that_throttles_every_key_fails_as_a_whole(s3_server, backend, status, code):
    """So the breaker opens: retries of every key, call after call, are what it asks to be spared."""
    with s3_server.failing("PUT|GET", status, code):
        for call in (lambda: backend.write(KEYS, FRAMES), lambda: read(backend)):
            with pytest.raises(BackendError, match=str(status)):
                call()


@pytest.mark.parametrize(
    "status, code, why",
    [
        (403, "AccessDenied", "see the README for those that are needed"),
        (403, "SignatureDoesNotMatch", "the secret key is wrong"),
        (403, "RequestTimeTooSkewed", "the clock of this machine"),
        (400, "ExpiredToken", "the credentials have expired"),
        (404, "NoSuchBucket", "no such bucket"),
        (301, "PermanentRedirect", "set `region`"),
    ],
)
def test_an_error_of_every_key_is_raised_in_plain_words(s3_server, backend, status, code, why):
    with s3_server.failing("PUT|GET", status, code):
        for call in (lambda: backend.write(KEYS, FRAMES), lambda: read(backend)):
            with pytest.raises(BackendError, match=re.escape(why)) as raised:
                call()
            assert ENVIRONMENT["AWS_ACCESS_KEY_ID"] not in str(raised.value), "the store's own words are not repeated"


@pytest.mark.parametrize("status, code", [(507, ""), (507, "InsufficientStorage"), (403, "QuotaExceeded")])
def test_a_full_store_is_full_and_can_be_read(s3_server, backend, status, code):
    backend.write([GOOD], [FRAMES[0]])
    with s3_server.failing("PUT", status, code):
        with pytest.raises(StoreFull) as raised:
            backend.write([BAD], [FRAMES[1]])
        assert raised.value.missing == NBYTES
        assert read(backend, [GOOD]) == [NBYTES]


def test_a_bucket_that_is_not_there_is_reported_at_once(open_s3):
    with pytest.raises(BackendError, match=r"s3://nowhere-at-all: 404 NoSuchBucket: no such bucket"):
        open_s3(bucket="nowhere-at-all")


def test_a_bucket_that_may_not_be_used_is_reported_at_once(s3_server, open_s3):
    with s3_server.failing(f"GET /{BUCKET}", 403), pytest.raises(BackendError, match="lack a permission"):
        open_s3()


def test_without_credentials_it_says_where_they_are_looked_for(open_s3, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(BackendError, match="set AWS_ACCESS_KEY_ID"):
        open_s3()


def test_a_profile_that_is_not_there(open_s3):
    with pytest.raises(BackendError, match="ProfileNotFound"):
        open_s3(profile="nobody")


def test_no_secret_is_shown(backend, config):
    shown = " ".join(map(repr, (config, backend, vars(backend), backend._bucket, backend.facts())))
    assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in shown and ENVIRONMENT["AWS_ACCESS_KEY_ID"] not in shown


def test_a_frame_read_during_deletes_is_whole_or_a_miss(open_s3):
    ours, theirs = open_s3(), open_s3()
    ours.write(KEYS, FRAMES)
    theirs.delete([BAD])
    views = [memoryview(bytearray(NBYTES)) for _ in KEYS]
    assert list(ours.read(KEYS, views)) == [NBYTES, 0, NBYTES]
    assert same(views[0], FRAMES[0]) and same(views[2], FRAMES[2])


def test_a_key_that_never_was(backend):
    assert read(backend, [make_key(99)]) == [0]
