"""A range of vLLM's versions is served. Others start too, with a warning in the log."""

from __future__ import annotations

import importlib
import sys

import pytest
from real_engines import cpu

import kvtier_vllm
from kvtier_vllm import versions


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0", "0.33.1rc1"])
def test_tested_versions_give_no_warning(version):
    assert versions.warning(version) == ""


@pytest.mark.parametrize("version", ["0.29.9", "0.34.0", "1.0.0", "0.3.30", "dev"])
def test_other_versions_give_a_warning(version):
    assert versions.warning(version) == f"vLLM {version} was not tested with this kvtier, which serves 0.30 to 0.33"


def test_the_version_warning_is_in_the_log(engine, said, monkeypatch):
    monkeypatch.setattr(versions, "warning", lambda: "who knows this vLLM?")
    with engine(cpu()):
        lines = said()
    assert lines.count("kvtier: who knows this vLLM?") == 1
    assert [line for line in lines if line.startswith("kvtier: version ") and " in vLLM 0.32" in line]


def test_the_connector_can_be_had_before_vllm_had_a_word_for_where_hits_come_from(monkeypatch):
    """As in 0.30 and 0.31, which have no such module."""
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    for name in ("versions", "metrics", "connector"):
        module = importlib.import_module(f"kvtier_vllm.{name}")
        monkeypatch.setattr(kvtier_vllm, name, module)  # to be put back
        monkeypatch.delitem(sys.modules, f"kvtier_vllm.{name}")
    connector = importlib.import_module("kvtier_vllm.connector")
    assert not connector.KVTierConnector.__abstractmethods__
    assert importlib.import_module("kvtier_vllm.versions").CacheHitSource is None
