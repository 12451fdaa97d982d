"""`kvtier fsck s3`, over a bucket in which something of everything lies."""

from pathlib import Path

import pytest

from kvtier_core.cli import main
from kvtier_core.errors import Gone
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_s3.names import Names
from kvtier_s3.space import BucketSpace
from kvtier_testing.samples import make_frame, make_keys, make_namespace

NBYTES = 4 * FRAME_ALIGNMENT
WHOLE, TORN, SWAPPED = KEYS = make_keys(3)


@pytest.fixture
def names(config):
    return Names.of(config.prefix, make_namespace())


@pytest.fixture
def file(tmp_path, config, open_s3, bucket, names):
    """A configuration whose bucket has a whole frame, a torn one, one under a wrong key, and what is no frame."""
    open_s3().write(KEYS, [make_frame(key, nbytes=NBYTES) for key in KEYS])
    bucket.calls.one(bucket.put, names.frame(TORN), bytes(make_frame(TORN, nbytes=NBYTES)[:-1]) + b"\xff")
    bucket.calls.one(bucket.put, names.frame(SWAPPED), make_frame(WHOLE, nbytes=NBYTES))
    bucket.calls.one(bucket.put, f"{names.folder}00/note.txt", b"x")
    bucket.calls.one(bucket.put, f"{config.prefix}/note.txt", b"not ours")
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n"
        f"  - {{type: s3, bucket: {config.bucket}, prefix: {config.prefix}, endpoint: '{config.endpoint}', "
        "capacity: 1GiB}\n"
    )
    return str(file)


def counts(out):
    rows = [line.split() for line in out.splitlines() if ":" not in line]
    return {row[0]: int(row[1]) for row in rows}


def test_everything_is_reported(file, capsys, bucket, names):
    assert main(["fsck", "s3", "--config", file]) == 1
    out = capsys.readouterr().out
    assert counts(out) == {"whole": 1, "torn": 1, "incompatible": 0, "foreign": 1, "orphaned": 1, "unreadable": 0}
    for told in (
        f"torn: {bucket.where}/{names.frame(TORN)}: the checksum does not match",
        f"orphaned: {bucket.where}/{names.frame(SWAPPED)}: a frame of another key",
        f"foreign: {bucket.where}/{names.folder}00/note.txt: not a frame by its name, place and length",
    ):
        assert told in out.splitlines()


@pytest.mark.more
def test_opening_and_measuring_leave_nothing(file, bucket, config):
    text = Path(file).read_text()
    Path(file).write_text(text.replace("capacity: 1MiB", "capacity: 64MiB"))
    assert main(["doctor", file]) == 0  # the account of the capacity is the store's own, and stays
    before = sorted(each.name for each in bucket.list(config.prefix))
    assert main(["check", file, "--open"]) == 0
    assert main(["doctor", file]) == 0
    assert sorted(each.name for each in bucket.list(config.prefix)) == before


def test_repair_leaves_what_is_whole_and_what_is_not_ours(file, capsys, bucket, config, names):
    assert main(["fsck", "s3", "--config", file, "--repair"]) == 0
    assert sorted(each.name for each in bucket.list(config.prefix)) == sorted(
        [names.frame(WHOLE), names.facts, f"{config.prefix}/note.txt", f"{config.prefix}/space.json"]
    )


@pytest.mark.parametrize("replaced", [True, False])
def test_entries_that_others_remove_or_replace_are_gone(config, bucket, names, open_s3, replaced):
    """And is not removed: nobody has looked at what lies there now."""
    open_s3().write([WHOLE], [make_frame(WHOLE, nbytes=NBYTES)])
    newer, name = make_frame(WHOLE, nbytes=NBYTES, seed=1), names.frame(WHOLE)
    with config.walk() as found:
        (stored,) = found
        bucket.calls.one(bucket.put, name, newer) if replaced else bucket.calls.one(bucket.delete, name)
        for use in (lambda: stored.read(0, 10), stored.remove):
            with pytest.raises(Gone):
                use()
    assert (bucket.fetch(name, 1 << 20) is not None) == replaced


def test_pieces_are_read_as_asked_for(config, open_s3):
    frame = make_frame(WHOLE, nbytes=NBYTES)
    open_s3().write([WHOLE], [frame])
    with config.walk() as found:
        (stored,) = found
        assert stored.read(5, 7) == frame[5:12]
        assert stored.read(NBYTES - 3, 100) == frame[-3:], "fewer only at its end"


def test_a_recount_corrects_the_account(file, config, bucket):
    account = BucketSpace(bucket, config.prefix)
    account.count(taken=1 << 29)
    assert main(["fsck", "s3", "--config", file, "--repair"]) == 0
    assert account.count().used == NBYTES
