"""Valid settings, and the messages for invalid ones."""

from __future__ import annotations

import pytest

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.types import Nbytes


def load(tmp_path, tier):
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {{type: mooncake, {tier}}}\n")
    return load_config(str(file), Registry.discover()).tiers[1]


def test_everything_at_once(tmp_path):
    tier = load(
        tmp_path,
        'master: "kv.example:50051", host: 10.0.0.7, protocol: rdma, devices: [mlx5_0, mlx5_1], segment: 16GiB, '
        'prefix: team/kv, replicas: 2, preferred_segment: "10.0.0.7:12345", hard_pin: true',
    )
    config = tier.config
    assert tier.capacity is None and config.shared
    assert (config.master, config.host, config.preferred_segment) == ("kv.example:50051", "10.0.0.7", "10.0.0.7:12345")
    assert (config.protocol, config.devices, config.segment) == ("rdma", ("mlx5_0", "mlx5_1"), Nbytes(16 << 30))
    assert (config.prefix, config.replicas, config.hard_pin) == ("team/kv", 2, True)


@pytest.mark.parametrize(
    ("written", "path", "why"),
    [
        ("master: host", "master", "write host:port"),
        ('master: ""', "master", "write host:port"),
        ('master: "me:s3cret@host:1"', "master", "write host:port"),
        ('host: "10.0.0.7:1"', "host", "write a host name or an address, without a port"),
        ("protocol: udp", "protocol", "'udp' is not one of tcp, rdma"),
        ("devices: [mlx5_0]", "devices", "only protocol: rdma has devices"),
        ("prefix: 'a*'", "prefix", "a prefix may contain letters, digits"),
        ("replicas: 0", "replicas", "'replicas' must be >= 1"),
        ("preferred_segment: host", "preferred_segment", "write host:port"),
    ],
)
def test_refused_settings(tmp_path, written, path, why):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, written)
    (problem,) = refused.value.problems
    assert problem.path == f"$.tiers[1].{path}"
    assert problem.why.startswith(why)
    assert "s3cret" not in str(refused.value)
