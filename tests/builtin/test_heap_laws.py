"""The heap keeps the laws of an arena, and is not reached from elsewhere."""

import pytest

from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.errors import BackendError
from kvtier_core.types import Nbytes
from kvtier_testing import ArenaLaws
from kvtier_testing.laws.base import in_new_process
from kvtier_testing.samples import make_context, make_layout


class TestHeapLaws(ArenaLaws):
    def config(self, folder):
        return HeapConfig()


def test_no_room_for_one_slot():
    ctx = make_context(layout=make_layout(page_nbytes=(4096,), blocks=1), capacity=Nbytes(4096))
    with pytest.raises(BackendError) as caught:
        HeapConfig().open(ctx)
    assert str(caught.value) == "heap: capacity 4KiB is smaller than one chunk (8KiB); increase it"


def test_another_process_cannot_attach():
    heap = HeapConfig().open(make_context(capacity=1 << 20))
    with pytest.raises(BackendError, match=r"^heap \{.*\} is not open in process \d+$"):
        in_new_process(HeapConfig().attach, heap.handle, None)


def test_a_closed_arena_cannot_be_attached():
    heap = HeapConfig().open(make_context(capacity=1 << 20))
    heap.close()
    with pytest.raises(BackendError, match="is not open in process"):
        HeapConfig().attach(heap.handle, None)


def test_a_view_outlives_close():
    heap = HeapConfig().open(make_context(capacity=1 << 20))
    view = heap.view(0)
    heap.close()
    view[:4] = b"kept"
    assert view[:4] == b"kept"
