"""An engine that cannot be served as asked does not start, and says everything that is wrong."""

from __future__ import annotations

import pytest
from real_engines import cpu, hit, miss, prompt

from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.transfer import numa

BROKEN = """\
version: 1
chunk_tokens: 100
load_wait: 2
tiers:
  - {type: cpu, capacity: 64MB}
  - {type: disc, capacity: 1GiB, path: /nowhere}
  - {type: disk, capacity: 1GiB, path: /nowhere, pth: /else}
"""


@pytest.mark.parametrize("path", [["a"], 7, {"a": 1}, True])
def test_the_configuration_must_be_named_by_a_path(path):
    from kvtier_vllm.startup import read_config

    with pytest.raises(ConfigError, match=r"kv_connector_extra_config: \$.kvtier.config: expected the path of a file"):
        read_config({"kvtier.config": path}, Registry.discover())


def test_every_problem_of_the_file_is_reported_at_once(engine, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text(BROKEN)
    with pytest.raises(ConfigError) as caught, engine({"kvtier.config": str(file)}):
        pass
    assert str(caught.value).replace(str(tmp_path), "") == (
        "/kvtier.yaml:3: $.load_wait: '2' is not a duration; write a number and ms, s or min\n"
        "/kvtier.yaml:5: $.tiers[0].capacity: '64MB' is not a size; "
        "write a whole number and B, KiB, MiB, GiB, TiB or PiB\n"
        "/kvtier.yaml:6: $.tiers[1].type: no tier 'disc' is installed "
        "(have: bundle, cpu, disk, gds, heap, mooncake, peers, redis, s3); did you mean 'disk'?\n"
        "/kvtier.yaml:7: $.tiers[2].pth: unknown key 'pth'; did you mean 'path'?"
    )


def test_a_broken_plugin_is_reported_even_if_unused(engine, said, tmp_path, monkeypatch):
    """Its author looks into the log, once and without a traceback; so do those who lack what it offers."""
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvtier.v1]\nwatch = acme_missing\nlru = acme_lru\n")
    (tmp_path / "acme_lru.py").write_text(
        "from kvtier_core.hookspecs import hookimpl\n"
        "from kvtier_core.policies.lru import LruConfig\n\n"
        "@hookimpl\ndef kvtier_eviction_policies():\n    return [LruConfig]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said()
    with engine(cpu()):
        told = "\n".join(said())
    assert told.count("acme:watch 1.0: ModuleNotFoundError: No module named 'acme_missing'") == 1
    assert told.count("eviction policy 'lru' is offered by acme:lru and by kvtier:builtin") == 1
    assert "kvtier: cpu: 64MiB, room for " in told


def test_chunks_that_do_not_fit_the_engines_blocks(engine):
    with pytest.raises(ConfigError) as caught, engine(cpu(chunk_tokens=100)):
        pass
    assert str(caught.value) == (
        "kv_connector_extra_config: $.chunk_tokens: 100 is not a multiple of the engine's block size 32; "
        "write 96 or 128"
    )


def test_an_arena_too_small_for_one_chunk(engine):
    with pytest.raises(ConfigError) as caught, engine(cpu("1KiB")):
        pass
    assert str(caught.value) == (
        "kv_connector_extra_config: $.tiers[0].capacity: 1KiB is smaller than one chunk (0.3MiB); write at least 260KiB"
    )


def test_a_folder_that_cannot_be_written(engine, tmp_path):
    (tmp_path / "file").write_text("")
    stack = cpu()
    stack["tiers"].append({"type": "disk", "path": str(tmp_path / "file"), "capacity": "1GiB"})
    with pytest.raises(ConfigError) as caught, engine(stack):
        pass
    assert str(caught.value).startswith("kv_connector_extra_config: $.tiers[1]: ")
    assert str(tmp_path / "file") in str(caught.value)


def test_the_configuration_may_come_from_the_environment(engine, monkeypatch, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text("version: 1\nchunk_tokens: 64\ntiers: [{type: heap, capacity: 64MiB}]\n")
    monkeypatch.setenv("KVTIER_CONFIG", str(file))
    asked = prompt(70, 530)
    with engine({}) as served:
        cached = [served.ask(asked)[0].cached for _ in range(2)]
        assert served.outcomes() == [miss(530), hit(530, heap=512)]
        assert cached == [0, 512]


def test_several_arenas(engine):
    """What the first arena had to let go is loaded straight from the second."""
    stack = cpu("2MiB")  # 7 chunks of 260 KiB
    stack["tiers"].append({"type": "heap", "capacity": "64MiB"})
    first, second = prompt(71, 400), prompt(72, 400)
    with engine(stack) as served:
        truth = served.ask(first)[0]
        served.settle()
        served.ask(second)
        served.settle()
        served.outcomes()
        again = served.ask(first)[0]
        assert served.outcomes() == [hit(400, cpu=64, heap=320)]
        assert again.differs(truth) < 1e-3
        served.assert_at_rest()


def test_sums_are_logged_while_the_engine_runs(engine, said):
    """A server that is stopped as usual is killed before it could tell."""
    with engine(cpu()) as served:
        served.connector.side.events._next_totals = 0.0
        said()
        served.ask(prompt(73, 530))
        served.settle()
        assert "kvtier: so far: cpu: stored 8 chunks (2MiB), hit 0 of 530 tokens" in said()


@pytest.mark.parametrize("nodes, near", [({0: range(4096), 1: ()}, True), ({0: range(4096)}, False)])
def test_slots_are_near_the_device_that_a_worker_reports(engine, said, monkeypatch, nodes, near):
    """On a machine with two nodes, as far as the worker sees; one that has one is left alone."""
    monkeypatch.setattr(numa, "nodes", lambda sys: {node: frozenset(cpus) for node, cpus in nodes.items()})
    said()
    with engine(cpu()):
        (tier,) = [line for line in said() if "; numa " in line]
    assert ("node 0" in tier) == near, "the kernel may refuse; then the line says for which node"
