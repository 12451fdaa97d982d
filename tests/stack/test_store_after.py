"""`store_after: 2` through a whole stack: what one prompt named costs no copy and no file; the second stores it."""

from __future__ import annotations

import pytest
from serving import FRAME, Serving, files

from kvtier_testing.samples import make_keys

KEYS = make_keys(16)
PATH, OTHERS = KEYS[:4], KEYS[8:]
#: Shares two chunks with PATH, and goes on in another way.
BRANCH = [*PATH[:2], *KEYS[4:6]]


@pytest.fixture
def kv(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def serving(tmp_path, kv):
    """Opens a stack of memory for eight chunks and, unless that is None, a disk."""

    def serving(*, memory=1, disk=1):
        file = tmp_path / "kvtier.yaml"
        tiers = [f"{{type: cpu, capacity: {8 * FRAME}B, store_after: {memory}}}"]
        if disk is not None:
            tiers.append(f"{{type: disk, path: {kv}, capacity: 1GiB, min_free: 0B, store_after: {disk}}}")
        file.write_text("\n  - ".join(["version: 1\ntiers:", *tiers]))
        return Serving(file)

    return serving


def chunks(serving):
    """Held in memory, and on disk if there is one."""
    return [usage.chunks for usage in serving.manager.usage()]


def test_a_disk_stays_empty_until_the_second_request(serving, kv):
    with serving(disk=2) as stack:
        assert stack.ask(PATH) == 0
        assert (chunks(stack), files(kv)) == ([4, 0], [])
        assert not stack.seen & {"written", "rejected"}
        assert stack.ask(PATH) == 4
        assert chunks(stack) == [4, 4]
        assert [file.stem for file in files(kv)] == sorted(key.hex() for key in PATH)


def test_a_chunk_named_once_is_not_copied(serving, kv):
    with serving(memory=2, disk=2) as stack:
        assert stack.ask(PATH) == 0
        assert (stack.copies, chunks(stack), files(kv)) == (0, [0, 0], [])
        assert stack.ask(PATH) == 0
        assert (stack.copies, chunks(stack), len(files(kv))) == (4, [4, 4], 4)
        assert stack.ask(PATH) == 4


def test_memory_alone_keeps_what_was_named_twice(serving):
    with serving(memory=2, disk=None) as stack:
        assert [stack.ask(PATH) for _ in range(3)] == [0, 0, 4]
        assert chunks(stack) == [4]


def test_a_chunk_for_the_disk_passes_through_memory_that_would_wait(serving, kv):
    """There is no other way down."""
    with serving(memory=2, disk=1) as stack:
        assert stack.ask(PATH) == 0
        assert (stack.copies, chunks(stack), len(files(kv))) == (4, [4, 4], 4)


def test_only_the_beginning_that_two_prompts_share_is_stored(serving, kv):
    with serving(memory=2, disk=2) as stack:
        stack.ask(PATH)
        stack.ask(BRANCH)
        assert (stack.copies, chunks(stack)) == (2, [2, 2])
        assert [file.stem for file in files(kv)] == sorted(key.hex() for key in PATH[:2])
        assert stack.ask(PATH) == 2


def test_a_request_that_looks_again_and_again_is_one(serving, kv):
    with serving(memory=2, disk=2) as stack:
        stack.ask(PATH)
        for _ in range(5):
            assert not stack.look_up(PATH)
            assert stack.manager.reserve(PATH, "test") == {}
        stack.settle()
        assert (stack.copies, chunks(stack), files(kv)) == (0, [0, 0], [])


def test_a_new_engine_promotes_chunks_from_disk_at_the_first_request(serving):
    with serving(memory=2, disk=2) as stack:
        stack.ask(PATH)
        stack.ask(PATH)
    with serving(memory=2, disk=2) as stack:
        assert chunks(stack) == [0, 4]
        assert stack.ask(PATH) == 4
        assert stack.ask(OTHERS) == 0
        assert chunks(stack) == [4, 4]
