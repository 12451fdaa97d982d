"""Real engines that start warm from a bundle: each hit gives the log-probabilities of the engine that computed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from other_engine import beside
from real_engines import cpu, hit, prompt
from test_server import NOISE, of, serving

from kvtier_bundle.backend import BundleBackend
from kvtier_core.cli import main

ASKED, OTHER = prompt(170, 530), prompt(171, 530)
HITS = 512


def stack_with(**tier):
    made = cpu()
    made["tiers"].append(tier)
    return made


@pytest.fixture(params=["raw", "zstd", "packed"])
def disk(request, tmp_path):
    """The settings of a tier on a disk, with each codec, and those that its bundle needs."""
    codec = {} if request.param == "raw" else {"serializer": {"type": request.param}}
    return {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1GiB", "min_free": "0B", **codec}, codec


def export(folder: Path, stack: dict, *options: str) -> str:
    """A bundle of what the disk of a stack holds."""
    (folder / "export.yaml").write_text(json.dumps(stack))
    bundle = str(folder / "prompts.kvbundle")
    assert main(["export", "disk", bundle, "--config", str(folder / "export.yaml"), *options]) == 0
    return bundle


@pytest.fixture(params=["float32", "bfloat16 packed"])
def kind(request):
    """Options of an engine, and of its memory."""
    return ({}, {}) if request.param == "float32" else ({"dtype": "bfloat16"}, {"packing": "auto"})


def test_an_engine_starts_warm_with_the_chunks_of_a_prompt_alone(engine, tmp_path, disk, kind, monkeypatch):
    (settings, codec), (options, memory) = disk, kind
    source = stack_with(**settings)
    source["tiers"][0] |= memory
    with engine(source, **options) as served:
        truth = served.ask(ASKED, OTHER)[0]
        served.settle()
        computed = served.ask(ASKED)[0]
    (tmp_path / "asked.json").write_text(json.dumps(ASKED))
    bundle = export(tmp_path, source, "--prompt", str(tmp_path / "asked.json"))
    wrote = []
    monkeypatch.setattr(BundleBackend, "write", lambda _, keys, frames: wrote.extend(keys))
    reader = stack_with(type="bundle", path=bundle, **codec)
    reader["tiers"][0] |= memory
    with engine(reader, **options) as served:
        (answer,) = served.ask(ASKED)
        assert served.outcomes()[-1] == hit(530, bundle=HITS)
        assert answer == computed and answer.tokens == truth.tokens
        served.ask(OTHER)
        assert served.outcomes()[-1].loaded == 0
        served.settle()
        served.assert_at_rest()
    assert not wrote


def test_an_engine_with_other_facts_starts_cold_and_says_which(engine, tmp_path, said):
    source = stack_with(type="disk", path=str(tmp_path / "disk"), capacity="1GiB", min_free="0B")
    with engine(source) as served:
        served.ask(ASKED)
        served.settle()
    reader = stack_with(type="bundle", path=export(tmp_path, source))
    with engine(reader, dtype="bfloat16") as served:
        served.ask(ASKED)
        assert served.outcomes()[-1].loaded == 0
    assert any("bundle holds another namespace: " in line for line in said())


def test_a_server_gives_a_bundle_to_its_engines(engine, fork_server, model, tmp_path):
    source = stack_with(type="disk", path=str(tmp_path / "disk"), capacity="1GiB", min_free="0B")
    with engine(source) as served:
        truth = served.ask(ASKED)[0]
        served.settle()
    bundle = export(tmp_path, source)
    with serving(tmp_path, f"{{type: bundle, path: {bundle}}}"), engine(of(tmp_path)) as first:
        assert first.ask(ASKED)[0].differs(truth) < NOISE
        assert first.outcomes()[-1] == hit(530, bundle=HITS)
        with beside(fork_server, model, of(tmp_path)) as second:
            assert second.ask(ASKED).differs(truth) < NOISE
            assert second.outcome == hit(530, cpu=HITS)


def test_a_bundle_that_loses_bytes_while_it_is_read_costs_only_hits(engine, tmp_path):
    source = stack_with(type="disk", path=str(tmp_path / "disk"), capacity="1GiB", min_free="0B")
    with engine(source) as served:
        truth = served.ask(ASKED)[0]
        served.settle()
    bundle = export(tmp_path, source)
    with engine(stack_with(type="bundle", path=bundle)) as served:
        os.truncate(bundle, os.path.getsize(bundle) // 2)
        assert served.ask(ASKED)[0].differs(truth) < NOISE
        assert served.outcomes()[-1].loaded < HITS
        served.assert_at_rest()
