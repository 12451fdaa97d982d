"""The requests of writes and reads: names, conditions, parts, versions."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier_core.errors import BackendError
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_s3 import bucket as bucket_module
from kvtier_s3 import writes
from kvtier_s3.bucket import Bucket
from kvtier_s3.names import Names
from kvtier_testing.laws.shared_processes import users, write_numbered
from kvtier_testing.samples import make_context, make_frame, make_key, make_keys, make_namespace, same

KEY = make_key(0)
NBYTES = 4 * FRAME_ALIGNMENT
SMALL = make_frame(KEY, nbytes=NBYTES)
PART = 5 << 20
LONG = make_frame(KEY, nbytes=2 * PART + 3 * FRAME_ALIGNMENT)


def read(backend, nbytes=None, key=KEY):
    into = memoryview(bytearray(nbytes or len(LONG)))
    (count,) = backend.read([key], [into])
    return count if isinstance(count, BackendError) else bytes(into[:count])


def modified(bucket, name):
    return [each.modified for each in bucket.list(name.rpartition("/")[0])]


@pytest.fixture
def name(config):
    return Names.of(config.prefix, make_namespace()).frame(KEY)


def test_names_come_from_namespace_and_key(backend, bucket, config):
    backend.write([KEY], [SMALL])
    home, digits = make_namespace().digest.hex()[:16], KEY.hex()
    assert sorted(each.name for each in bucket.list(config.prefix)) == [
        f"{config.prefix}/{home}/{digits[:2]}/{digits}.kv",
        f"{config.prefix}/{home}/namespace.json",
    ]


def test_many_objects_are_listed_each_once(backend, bucket, config, monkeypatch):
    keys = make_keys(60)
    backend.write(keys, [make_frame(key) for key in keys])
    few = bucket.list(config.prefix + "/" + make_namespace().digest.hex()[:16])
    monkeypatch.setattr(bucket_module, "_PAGE", 7)
    many = bucket.list(config.prefix + "/" + make_namespace().digest.hex()[:16])
    assert len(many) == 61
    assert sorted(each.name for each in many) == sorted(each.name for each in few)


def test_the_facts_of_other_namespaces_are_reported(open_s3):
    theirs = make_namespace("theirs")
    open_s3(namespace=theirs)
    assert list(open_s3().namespaces()) == [theirs]


def test_a_new_frame_costs_one_request(backend, asked):
    backend.write([KEY], [SMALL])
    assert asked() == ["PUT if-none-match"]


def test_a_frame_of_another_engine_is_not_replaced(open_s3, bucket, name, asked):
    """It is compared by its length and by its header, which has the checksum of the payload."""
    ours, theirs = open_s3(), open_s3()
    theirs.write([KEY], [SMALL])
    (before,) = modified(bucket, name)
    asked()
    assert ours.write([KEY], [SMALL]) is None
    assert asked() == ["PUT if-none-match", "HEAD"]
    assert modified(bucket, name) == [before]


@pytest.mark.parametrize("frame", [SMALL, LONG], ids=["small", "in parts"])
@pytest.mark.parametrize("other", [make_frame(KEY, nbytes=len(SMALL), seed=1), make_frame(KEY, nbytes=FRAME_ALIGNMENT)])
def test_another_frame_under_the_key_is_replaced(open_s3, frame, other):
    ours, theirs = open_s3(), open_s3()
    theirs.write([KEY], [other])
    ours.write([KEY], [frame])
    assert same(read(theirs), frame)


@pytest.mark.parametrize("frame", [SMALL, LONG], ids=["small", "in parts"])
def test_a_damaged_frame_with_the_same_header_is_replaced(backend, frame):
    damaged = memoryview(bytearray(frame))
    damaged[-1] ^= 1
    backend.write([KEY], [damaged])
    backend.write([KEY], [frame])
    assert same(read(backend), frame)


def test_where_etags_are_no_digests_the_header_decides(backend, asked, monkeypatch):
    """As where a key of KMS encrypts. The first frame that is there is sent again, and its ETag tells."""
    monkeypatch.setattr(writes, "_digest", lambda frame, part: "another digest")
    backend.write([KEY], [SMALL])
    asked()
    backend.write([KEY], [SMALL])
    backend.write([KEY], [SMALL])
    assert asked() == ["PUT if-none-match", "HEAD", "PUT", "PUT if-none-match", "HEAD"]


@pytest.mark.parametrize("frame", [SMALL, LONG], ids=["small", "in parts"])
def test_an_intact_looking_frame_is_replaced_only_after_a_quarantine(backend, asked, frame):
    """Only who reads all of a frame knows that it is damaged."""

    def sent():
        asked()
        backend.write([KEY], [frame])
        return [each for each in asked() if each.startswith(("PUT", "POST")) and "if-none" not in each]

    backend.write([KEY], [frame])
    assert not sent()
    backend.quarantine([KEY])
    assert sent()
    assert not sent()


def test_a_store_without_conditions_is_written_without(s3_server, backend, asked):
    with s3_server.failing("PUT .*kv", 501, "NotImplemented", times=5):
        assert backend.write([KEY], [SMALL]) is None
    backend.write([make_key(1)], [make_frame(make_key(1))])
    assert asked() == ["PUT if-none-match"] * 5 + ["HEAD", "PUT"] * 2
    assert same(read(backend), SMALL)


def test_a_long_frame_goes_in_parts_and_comes_in_ranges(backend, asked):
    assert backend.write([KEY], [LONG]) is None
    assert asked() == ["HEAD", "POST uploads", *["PUT partNumber"] * 3, "POST uploadId"]
    asked()
    assert same(read(backend, len(LONG) + FRAME_ALIGNMENT), LONG)
    assert asked() == ["GET", "GET if-match", "GET if-match"]


@pytest.mark.parametrize("nbytes", [PART - FRAME_ALIGNMENT, PART, PART + FRAME_ALIGNMENT, 2 * PART])
def test_frames_around_the_length_of_a_part(backend, nbytes):
    frame = make_frame(KEY, nbytes=nbytes)
    backend.write([KEY], [frame])
    for room in (nbytes, nbytes + FRAME_ALIGNMENT, 3 * PART):
        assert same(read(backend, room), frame)
    assert same(read(backend, nbytes - 1), b"")


@pytest.mark.parametrize("refused", ["PUT .*partNumber=2", "POST .*uploadId"])
def test_an_upload_that_fails_is_given_up(s3_server, backend, refused):
    with s3_server.failing(refused, 403, "AccessDenied"), pytest.raises(BackendError, match="AccessDenied"):
        backend.write([KEY], [LONG])
    assert same(read(backend), b"")
    assert s3_server.unfinished_uploads() == 0


def test_an_upload_that_the_store_refuses_while_it_answers_well(backend, s3_server):
    """It sends 200 before it knows."""
    with s3_server.failing("POST .*uploadId", 200, "InternalError"), pytest.raises(BackendError, match="InternalError"):
        backend.write([KEY], [LONG])


def test_a_frame_replaced_during_its_read_is_a_miss(backend, bucket, name, monkeypatch):
    backend.write([KEY], [LONG])
    newer, get = make_frame(KEY, nbytes=len(LONG), seed=1), Bucket.get

    async def replaced_before_the_second_range(self, *args, etag="", **more):
        if etag:
            monkeypatch.undo()
            await self.put(name, newer)
        return await get(self, *args, etag=etag, **more)

    monkeypatch.setattr(Bucket, "get", replaced_before_the_second_range)
    assert same(read(backend), b"")
    assert same(read(backend), newer)


def test_processes_that_write_the_same_keys_at_the_same_time_all_succeed(config, backend):
    with users(2) as processes:
        both = [processes.submit(write_numbered, config, make_context(capacity=0), range(30), NBYTES) for _ in range(2)]
        assert [each.result() for each in both] == [[], []]
    assert all(len(read(backend, NBYTES, make_key(number))) == NBYTES for number in range(30))


def test_an_identical_frame_is_sent_whole_by_one_engine_only(open_s3, bucket, name):
    """However many have the same prompt at the same time."""
    engines = [open_s3() for _ in range(4)]
    with ThreadPoolExecutor(len(engines)) as threads:
        list(threads.map(lambda engine: engine.write([KEY], [SMALL]), engines))
    first = modified(bucket, name)
    time.sleep(1.1)  # what HTTP calls another time
    engines[0].write([KEY], [SMALL])
    assert modified(bucket, name) == first


def test_asking_for_many_keys_is_asking_for_each(backend, asked):
    keys = make_keys(128)
    backend.write(keys[:3], [make_frame(key) for key in keys[:3]])
    asked()
    assert list(backend.contains(keys)) == [True] * 3 + [False] * 125
    assert asked() == ["HEAD"] * 128


def test_a_tier_works_inside_a_running_event_loop(open_s3):
    """As in a notebook, where an engine is made in one."""
    key = make_key(0)

    async def live():
        backend = open_s3()
        backend.write([key], [make_frame(key)])
        return list(backend.contains([key]))

    assert asyncio.run(live()) == [True]
