"""A capacity that engines share: counted together in the bucket, and the oldest frames leave first."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.storekit.shared_space import Count
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey
from kvtier_s3 import bucket as bucket_module
from kvtier_s3 import opening, space
from kvtier_s3.bucket import Bucket, Listed
from kvtier_s3.space import BucketSpace, frames_in
from kvtier_testing.samples import make_frame, make_keys, make_namespace

NBYTES = 2 * FRAME_ALIGNMENT
CAPACITY = 64 * NBYTES


def write(backend, keys):
    for key in keys:
        backend.write([key], [make_frame(key, nbytes=NBYTES)])


def held(bucket, config):
    return sum(each.nbytes for each in frames_in(bucket, config.prefix))


def held_at_once(bucket, config):
    """In one listing: a frame may leave one namespace and another one come to the next between two."""
    return sum(each.nbytes for each in bucket.list(config.prefix) if each.nbytes == NBYTES)


def counted(bucket, config):
    return BucketSpace(bucket, config.prefix).count().used


@pytest.mark.more
def test_three_engines_keep_within_one_capacity(open_s3, bucket, config):
    """Of two namespaces, at the same time; at no moment is there more."""
    engines = [open_s3(capacity=CAPACITY, timeout=60, namespace=make_namespace(model)) for model in ("a", "a", "b")]
    keys = make_keys(150)
    seen = []
    with ThreadPoolExecutor(len(engines)) as threads:
        writes = [threads.submit(write, engine, keys[i::3]) for i, engine in enumerate(engines)]
        while not all(each.done() for each in writes):
            seen.append(held_at_once(bucket, config))
        for each in writes:
            each.result()
    assert held_at_once(bucket, config) > CAPACITY // 2
    assert max(seen) <= CAPACITY
    for engine in engines:
        engine.close()
    assert counted(bucket, config) == held(bucket, config)


def test_the_oldest_frames_leave_first(open_s3, bucket, config):
    engine = open_s3(capacity=CAPACITY)
    old, new = make_keys(74)[:64], make_keys(74)[64:]
    write(engine, old[:10])
    time.sleep(1.1)  # a listing tells the second of a write
    write(engine, old[10:])
    write(engine, new[:8])
    assert all(engine.contains(new[:8])) and all(engine.contains(old[10:]))


def test_a_replaced_frame_takes_only_the_difference(open_s3, bucket, config):
    engine, keys = open_s3(capacity=CAPACITY), make_keys(3)
    write(engine, keys)
    write(engine, keys)
    engine.write(keys[:1], [make_frame(keys[0], nbytes=2 * NBYTES)])
    engine.delete(keys[1:])
    engine.delete(keys[1:])
    engine.close()
    assert counted(bucket, config) == held(bucket, config) == 2 * NBYTES


def test_frames_that_were_not_written_are_not_counted(s3_server, open_s3, bucket, config):
    engine, keys = open_s3(capacity=CAPACITY), make_keys(3)
    with s3_server.failing(keys[1].hex(), 403, "AccessDenied"):
        engine.write(keys, [make_frame(key, nbytes=NBYTES) for key in keys])
    engine.close()
    assert counted(bucket, config) == held(bucket, config) == 2 * NBYTES


def test_frames_that_were_stored_and_not_answered_are_counted(s3_server, open_s3, bucket, config):
    engine, keys = open_s3(capacity=CAPACITY, timeout=5), make_keys(5)
    write(engine, keys[:1])
    with s3_server.silent("PUT .*[0-9a-f]{64}"):
        outcomes = engine_write(engine, keys[1:])
    assert all(isinstance(each, BackendError) for each in outcomes)
    engine.close()
    assert counted(bucket, config) == held(bucket, config) == 5 * NBYTES


def test_a_conditional_write_that_meets_itself_is_counted(s3_server, open_s3, bucket, config):
    """The store did it and answered with an error: what is sent again finds that the condition does not hold."""
    engine, keys = open_s3(capacity=CAPACITY, timeout=5), make_keys(2)
    write(engine, keys[:1])
    with s3_server.silent("PUT .*[0-9a-f]{64}", times=1):
        write(engine, keys[1:])
    engine.close()
    assert counted(bucket, config) == held(bucket, config) == 2 * NBYTES


def engine_write(engine, keys):
    """The outcome for each key, even if the store as a whole failed."""
    try:
        return engine.write(keys, [make_frame(key, nbytes=NBYTES) for key in keys])
    except BackendError as error:
        return [error] * len(keys)


def test_a_lock_that_a_killed_engine_left_is_taken_over(open_s3, bucket, config, monkeypatch):
    lock, account = f"{config.prefix}/evicting.json", BucketSpace(bucket, config.prefix)
    bucket.calls.one(bucket.put, lock, b"{}")
    with bucket.calls.within(0.5), pytest.raises(BackendError, match="not finished in time"), account.evicting():
        pass
    assert bucket.fetch(lock, 1 << 20).body == b"{}", "a young lock is respected"
    monkeypatch.setattr(space, "_STALE_SECONDS", -1.0)
    with account.evicting():
        assert bucket.fetch(lock, 1 << 20).body != b"{}"
    assert bucket.fetch(lock, 1 << 20) is None


def test_only_one_evicts(bucket, config):
    inside = []

    def evict(_):
        with bucket.calls.within(60), account_of().evicting():
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.02)
            inside.pop()

    def account_of():
        return BucketSpace(bucket, config.prefix)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(evict, range(3)))


def test_the_counter_adds_what_everyone_adds(bucket, config):
    def add(_):
        with bucket.calls.within(60):
            for _ in range(5):
                BucketSpace(bucket, config.prefix).count(taken=3)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(4)))
    assert counted(bucket, config) == 60


def test_an_addition_whose_answer_was_lost_counts_once(bucket, config, monkeypatch):
    """The store did it, and says when it is asked again that the condition does not hold: by what was written."""
    account, put = BucketSpace(bucket, config.prefix), Bucket.put
    account.count(taken=1)

    async def put_twice(self, *args, **how):
        await put(self, *args, **how)
        return await put(self, *args, **how)

    monkeypatch.setattr(Bucket, "put", put_twice)
    assert account.count(freed=5, taken=7).used == 3
    assert counted(bucket, config) == 3


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"taken": "many"}', b"[" * 10000])
def test_an_account_that_is_damaged_is_one_that_is_not_there(bucket, config, damage):
    account = BucketSpace(bucket, config.prefix)
    bucket.calls.one(bucket.put, f"{config.prefix}/space.json", damage)
    assert account.count() == Count(0, 0)
    assert account.count(taken=5) == account.count() == Count(5, 0)


def test_frames_are_deleted_many_at_a_time_and_all_are_counted(bucket, config, open_s3, asked):
    write(open_s3(), make_keys(40))
    account = BucketSpace(bucket, config.prefix, ahead=15 * NBYTES)
    account.count(taken=40 * NBYTES)
    asked()
    with account.evicting():
        (oldest, nbytes), *_ = account.oldest()
        assert account.remove(oldest)
        account.count(freed=nbytes)
    assert asked().count("DELETE") == 16 + 1  # the lock's
    assert counted(bucket, config) == held(bucket, config) == 24 * NBYTES


def test_an_eviction_compares_no_frame_with_all_others(bucket, config, open_s3, monkeypatch):
    write(open_s3(), make_keys(80))
    account, compared, equal = BucketSpace(bucket, config.prefix), [], Listed.__eq__
    monkeypatch.setattr(Listed, "__eq__", lambda one, other: compared.append(one) or equal(one, other))
    with account.evicting():
        for frame, _ in account.oldest():
            account.remove(frame)
    assert held(bucket, config) == 0
    assert len(compared) <= 80


@pytest.mark.parametrize("ignored", ["if-match", "if-none-match"])
def test_without_conditions_there_is_no_capacity(open_s3, monkeypatch, ignored):
    """Such a store writes whatever the condition says."""
    put = Bucket.put

    def unconditional(self, *args, new=False, etag="", **more):
        return put(
            self, *args, new=new and ignored != "if-none-match", etag=etag if ignored != "if-match" else "", **more
        )

    monkeypatch.setattr(Bucket, "put", unconditional)
    with pytest.raises(ConfigError) as raised:
        open_s3(capacity=CAPACITY)
    (problem,) = raised.value.problems
    assert problem.path == "$.capacity" and "If-Match" in problem.why


def test_without_a_capacity_nothing_is_counted(open_s3, bucket, config, asked):
    engine, (key,) = open_s3(), make_keys(1)
    asked()
    write(engine, [key])
    assert asked() == ["PUT if-none-match"]
    assert bucket.fetch(f"{config.prefix}/space.json", 1 << 20) is None


# -- very many frames ----------------------------------------------------------------------------------


@pytest.fixture
def few_at_a_time(monkeypatch):
    """As if a store of a hundred frames were a large one."""
    monkeypatch.setattr(bucket_module, "_PAGE", 16)
    for module in (space, opening):
        monkeypatch.setattr(module, "MOST_LISTED", 32)


def test_an_eviction_lists_a_bounded_number_of_frames(open_s3, bucket, config, few_at_a_time, monkeypatch):
    engine, keys = open_s3(capacity=200 * NBYTES), make_keys(230)
    write(engine, keys[:200])
    listed = []
    answers = Bucket._list

    async def counted_list(*arguments, **options):
        found = await answers(*arguments, **options)
        listed.extend(found)
        return found

    monkeypatch.setattr(Bucket, "_list", counted_list)
    most = 0
    for key in keys[200:]:
        listed.clear()
        write(engine, [key])
        most = max(most, len(listed))
    assert 0 < most < 150, "a page, and a window for each digit, of 200"
    assert held(bucket, config) <= 200 * NBYTES
    assert all(engine.contains(keys[-5:]))
    engine.close()
    assert counted(bucket, config) >= held(bucket, config)


def test_a_sample_of_a_store_that_is_not_large_is_all_of_it(open_s3, bucket, config, few_at_a_time):
    write(open_s3(), make_keys(60))
    sampled, whole = space.sample_of(bucket, config.prefix, 16 * 60)
    assert whole and sorted(each.name for each in sampled) == sorted(
        each.name for each in frames_in(bucket, config.prefix)
    )
    sampled, whole = space.sample_of(bucket, config.prefix, 32)
    assert not whole and 16 <= len(sampled) <= 32


def test_any_frame_may_be_drawn(open_s3, bucket, config, few_at_a_time, monkeypatch):
    """Also in the middle of a folder of many: frames are named by the first byte of their key, and then all of it."""
    keys = [ChunkKey(b"\xa3" + bytes(key)[1:]) for key in make_keys(60)]
    write(open_s3(), keys)
    drawn = set()
    for digit in "02468ace":
        monkeypatch.setattr(bucket_module.secrets, "token_hex", lambda nbytes, digit=digit: f"3{digit}000000")
        sampled, _ = space.sample_of(bucket, config.prefix, 16 * 16)
        assert len(sampled) == 16
        drawn.update(each.name for each in sampled)
    assert drawn == {each.name for each in frames_in(bucket, config.prefix)} and len(drawn) == len(keys)


@pytest.mark.more
def test_small_namespaces_leave_their_share_of_a_sample_to_large_ones(open_s3, bucket, config, few_at_a_time):
    write(open_s3(), make_keys(300))
    for model in ("a", "b", "c"):
        other = open_s3(namespace=make_namespace(model))
        other.write(make_keys(1), [make_frame(make_keys(1)[0], nbytes=NBYTES, namespace=make_namespace(model))])
    sampled, whole = space.sample_of(bucket, config.prefix, 64)
    assert not whole and 32 < len(sampled) <= 67


def test_an_account_that_was_lost_is_counted_from_all_frames(open_s3, bucket, config, few_at_a_time):
    """However large the store: a sample would say too little, and the capacity would be exceeded."""
    engine = open_s3(capacity=100 * NBYTES)
    write(engine, make_keys(100))
    bucket.calls.one(bucket.delete, f"{config.prefix}/space.json")
    write(open_s3(capacity=100 * NBYTES), make_keys(130)[100:])
    assert held(bucket, config) <= 100 * NBYTES
