"""The pages of a model under its name: those of other weights are never found, whatever becomes of the files."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import HANG, wait_until

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_hosts.model_pages import ModelPages, Page
from kvtier_hosts.pages import PageStore

PAGE = Page("(2, 8192) torch.uint8", 16_384)
OTHER = Page("(2, 4096) torch.uint16", 16_384)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


def change(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 1000)


@pytest.fixture
def pages(tmp_path, model) -> Iterator:
    """``pages()`` are those of the model on a disk. All are closed in the end."""
    opened = []

    def start(replica=0, replicas=1, name="ours", facts=(), **settings) -> ModelPages:
        tiers = [{"type": "cpu", "capacity": "4MiB"}]
        tiers.append({"type": "disk", "path": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": "0B"})
        config = load_config({"version": 1, "tiers": tiers, **settings}, Registry.discover())
        opened.append(ModelPages(config, name, model, dict(facts), replica=replica, replicas=replicas))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def store_for(pages: ModelPages, page: Page | None = PAGE) -> PageStore | None:
    told: queue.SimpleQueue[PageStore | None] = queue.SimpleQueue()
    pages.when_open(page, told.put)
    return told.get(timeout=HANG)


def opened(pages: ModelPages, page: Page = PAGE) -> PageStore:
    wait_until(lambda: store_for(pages, page), "it does not open")
    return store_for(pages, page)


def wait(pages: ModelPages, ticket: int) -> set[bytes]:
    (result,) = wait_until(lambda: list(pages.poll()), "the job does not end")
    assert result.ticket == ticket
    return set(result.keys)


def put(pages: ModelPages, page: Page = PAGE) -> None:
    """One life, in which a page is stored."""
    assert wait(pages, opened(pages, page).put([b"key"], [memoryview(bytearray(page.nbytes))])) == {b"key"}
    pages.close()


def found(pages: ModelPages, page: Page = PAGE) -> bool:
    answer = wait(pages, opened(pages, page).contains([b"key"])) == {b"key"}
    pages.close()
    return answer


def test_the_same_weights_find_their_pages_after_a_restart(pages):
    put(pages())
    assert found(pages())


def test_other_weights_under_the_same_name_find_nothing(pages, model):
    put(pages())
    change(model)
    assert not found(pages())


def test_other_facts_names_or_pages_of_the_same_length_find_nothing(pages):
    put(pages())
    assert not found(pages(facts={"host": "another"}))
    assert not found(pages(name="theirs"))
    assert not found(pages(), OTHER)
    assert found(pages())


def test_weights_that_change_meanwhile_end_it(pages, model, caplog):
    serving = pages()
    store = opened(serving)
    change(model)
    wait_until(lambda: store_for(serving) is None, "it goes on")
    assert "have changed; restart the host with its engines" in serving.ended
    wait_until(lambda: serving.ended in caplog.text, "nobody is told")
    assert wait(serving, store.put([b"key"], [memoryview(bytearray(PAGE.nbytes))])) == set()


def test_weights_that_change_before_the_first_page_end_it(pages, model):
    """Nobody knows which of both the engine has loaded."""
    serving = pages()
    change(model)
    wait_until(lambda: serving.ended, "it goes on")
    assert store_for(serving) is None


def test_calls_wait_until_it_is_open(pages):
    serving = pages()
    first = store_for(serving)
    assert first is not None
    assert store_for(serving, None) is first, "pages of the first kind"


def test_calls_wait_no_longer_than_load_wait(pages, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("kvtier_core.identity.weights.digest", lambda *_, **__: (released.wait(HANG), "a" * 64)[1])
    serving = pages(load_wait="0.1s")
    assert store_for(serving) is store_for(serving) is None
    released.set()
    wait_until(lambda: store_for(serving), "it does not open")


def test_a_page_of_unknown_kind_is_nowhere_before_the_first_one(pages):
    serving = pages()
    assert store_for(serving, None) is None
    assert opened(serving)


def test_pages_of_a_second_kind_are_refused(pages, caplog):
    serving = pages()
    opened(serving)
    assert store_for(serving, OTHER) is store_for(serving, OTHER) is None
    assert caplog.text.count("ours has pages of several kinds; only the first is stored") == 1


def test_models_share_the_tiers_and_take_no_pages_from_each_other(pages):
    ours, theirs = pages(0, 2), pages(1, 2, name="theirs")
    for each in (ours, theirs):
        put(each)
    assert found(pages(0, 2))
    assert found(pages(1, 2, name="theirs"))


def test_a_model_that_cannot_be_opened_is_reported(pages, caplog):
    """Its tiers belong to another process, for instance."""
    opened(pages())
    second = pages()
    assert store_for(second) is None
    wait_until(lambda: "kvtier: ours is no longer served: ConfigError" in caplog.text, "it goes on")


def test_a_folder_without_weights_is_refused(pages, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot read the weights of ours: none in .*name:"):
        pages()


def test_named_weights_need_no_files(pages, model, caplog):
    (model / "model.safetensors").unlink()
    put(pages(identity={"weights": "name:first"}))
    assert not found(pages(identity={"weights": "name:second"}))
    assert found(pages(identity={"weights": "name:first"}))
    assert "the weights of ours are assumed to be name:first; this is not checked" in caplog.text
