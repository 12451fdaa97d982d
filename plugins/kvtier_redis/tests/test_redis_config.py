"""Valid settings, and the messages for invalid ones."""

from __future__ import annotations

import pytest

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.types import EnvSecret, Nbytes, Seconds


def load(tmp_path, tier):
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {{type: redis, {tier}}}\n")
    return load_config(str(file), Registry.discover()).tiers[1]


@pytest.mark.parametrize(
    "url", ["redis://host", "redis://host:6380", "redis://[::1]:6379/2", "rediss://host:1/0", "unix:///run/redis.sock"]
)
def test_a_url_is_taken_as_it_is_written(tmp_path, url):
    assert load(tmp_path, f'url: "{url}"').config.url == url


def test_everything_at_once(tmp_path):
    tier = load(
        tmp_path,
        'mode: sentinel, sentinels: ["a:26379", "b:26379"], service: kv, username: engine, password: "env:SECRET", '
        "verify: false, prefix: team/kv, ttl: 60min, part: 2MiB",
    )
    assert tier.capacity is None
    assert tier.config.shared and tier.config.sentinels == ("a:26379", "b:26379")
    assert (tier.config.password, tier.config.ttl) == (EnvSecret("SECRET"), Seconds(3600))
    assert tier.config.part == Nbytes(2 << 20)


@pytest.mark.parametrize(
    ("written", "path", "why"),
    [
        ('url: "redis://:s3cret@host"', "url", "the url must not contain a password; write password: env:NAME"),
        ('url: "redis://me:s3cret@host"', "url", "the url must not contain a password; write password: env:NAME"),
        ('url: "redis://me:s3cret@host:x"', "url", "write redis://host:port/db"),
        ('url: "redis://me@host"', "url", "the url must not contain a user; write username:"),
        ('url: "http://host"', "url", "write redis://host:port/db"),
        ('url: "redis://host/db"', "url", "write redis://host:port/db"),
        ('url: "redis://host/0?password=s3cret"', "url", "write redis://host:port/db"),
        ('url: "unix://run/redis.sock"', "url", "write redis://host:port/db"),
        ('url: "unix:///run/redis.sock", mode: cluster', "mode", "mode: cluster needs hosts and ports"),
        (
            'url: "redis://host/1", mode: cluster',
            "mode",
            "a cluster has only database 0; leave the number out of the url",
        ),
        ("mode: sentinel", "mode", "mode: sentinel needs sentinels, host:port of each, and service"),
        ("mode: many", "mode", "'many' is not one of single, cluster, sentinel"),
        ("sentinels: [host]", "sentinels", "write each sentinel as host:port"),
        ("password: s3cret", "password", "write env:NAME"),
        ("prefix: 'a{b}'", "prefix", "a prefix may contain letters, digits"),
        ("prefix: 'a*'", "prefix", "a prefix may contain letters, digits"),
        ("part: 1KiB", "part", "a part has from 4KiB to 64MiB"),
        ("part: 1GiB", "part", "a part has from 4KiB to 64MiB"),
        ("ttl: 10ms", "ttl", "frames must live for at least a second"),
    ],
)
def test_refused_settings(tmp_path, written, path, why):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, written)
    (problem,) = refused.value.problems
    assert problem.path == f"$.tiers[1].{path}"
    assert problem.why.startswith(why)
    assert "s3cret" not in str(refused.value)
