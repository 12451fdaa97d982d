from __future__ import annotations

from tier_settings import SECRET, TierSettings

from kvtier_core.types import Nbytes


class TestSettings(TierSettings):
    type = "mooncake"
    accepted = (
        (
            'master: "kv.example:50051", host: 10.0.0.7, protocol: rdma, devices: [mlx5_0, mlx5_1], segment: 16GiB, '
            'prefix: team/kv, replicas: 2, preferred_segment: "10.0.0.7:12345", hard_pin: true',
            {
                "master": "kv.example:50051",
                "host": "10.0.0.7",
                "protocol": "rdma",
                "devices": ("mlx5_0", "mlx5_1"),
                "segment": Nbytes(16 << 30),
                "prefix": "team/kv",
                "replicas": 2,
                "preferred_segment": "10.0.0.7:12345",
                "hard_pin": True,
            },
        ),
    )
    refused = (
        ("master: host", "master", "write host:port"),
        ('master: ""', "master", "write host:port"),
        (f'master: "me:{SECRET}@host:1"', "master", "write host:port"),
        ('host: "10.0.0.7:1"', "host", "write a host name or an address, without a port"),
        ("protocol: udp", "protocol", "'udp' is not one of tcp, rdma"),
        ("devices: [mlx5_0]", "devices", "devices need protocol: rdma"),
        ("prefix: 'a*'", "prefix", "a prefix may contain letters, digits"),
        ("replicas: 0", "replicas", "'replicas' must be >= 1"),
        ("preferred_segment: host", "preferred_segment", "write host:port"),
    )
