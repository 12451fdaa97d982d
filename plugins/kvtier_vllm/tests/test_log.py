"""The logger `kvtier` beside vLLM's, without an engine. `test_processes` reads the log of engines."""

from __future__ import annotations

import logging

import pytest

from kvtier_vllm.log import attach

KVTIER, VLLM = logging.getLogger("kvtier"), logging.getLogger("vllm")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.fixture(autouse=True)
def as_imported(monkeypatch):
    """Both loggers as they are when nobody has configured them."""
    for log in (KVTIER, VLLM):
        monkeypatch.setattr(log, "handlers", [])
        monkeypatch.setattr(log, "propagate", True)
        monkeypatch.setattr(log, "disabled", False)
        log.setLevel(logging.NOTSET)
    yield
    for log in (KVTIER, VLLM):
        log.setLevel(logging.NOTSET)


def test_lines_reach_the_handler_that_vllm_has_at_that_time_and_no_other(monkeypatch):
    first, second, root = Lines(), Lines(), Lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [root])
    VLLM.propagate = False
    attach()
    attach()
    for handler in (first, second):
        VLLM.handlers = [handler]
        VLLM.setLevel(logging.INFO)
        KVTIER.info("one line")
        KVTIER.debug("not at this level")
    assert (first.found, second.found, root.found) == (["one line"], ["one line"], [])


def test_a_logging_file_that_does_not_name_kvtier_does_not_silence_it():
    """`dictConfig` disables all loggers that it does not name, unless the file says otherwise."""
    VLLM.addHandler(lines := Lines())
    KVTIER.disabled = True
    attach()
    KVTIER.warning("one line")
    assert lines.found == ["one line"]


def test_a_logging_file_that_names_kvtier_has_its_own_way():
    VLLM.addHandler(vllm := Lines())
    KVTIER.addHandler(own := Lines())
    KVTIER.setLevel(logging.ERROR)
    KVTIER.propagate = False
    attach()
    KVTIER.warning("below its level")
    KVTIER.error("one line")
    assert (own.found, vllm.found) == (["one line"], [])
