from __future__ import annotations

from pathlib import Path

from tier_settings import SECRET, TierSettings

from kvtier_core.types import EnvSecret, Nbytes, Seconds

URLS = ["redis://host", "redis://host:6380", "redis://[::1]:6379/2", "rediss://host:1/0", "unix:///run/redis.sock"]


class TestSettings(TierSettings):
    type = "redis"
    accepted = (
        *((f'url: "{url}"', {"url": url}) for url in URLS),
        (
            'mode: sentinel, sentinels: ["a:26379", "b:26379"], service: kv, username: engine, password: "env:SECRET", '
            "ca: /ca.pem, cert: /cert.pem, key: /key.pem, verify: false, prefix: team/kv, ttl: 60min, part: 2MiB",
            {
                "mode": "sentinel",
                "sentinels": ("a:26379", "b:26379"),
                "service": "kv",
                "username": "engine",
                "password": EnvSecret("SECRET"),
                "ca": Path("/ca.pem"),
                "cert": Path("/cert.pem"),
                "key": Path("/key.pem"),
                "verify": False,
                "prefix": "team/kv",
                "ttl": Seconds(3600),
                "part": Nbytes(2 << 20),
            },
        ),
    )
    refused = (
        (f'url: "redis://:{SECRET}@host"', "url", "the url must not contain a password; write password: env:NAME"),
        (f'url: "redis://me:{SECRET}@host"', "url", "the url must not contain a password; write password: env:NAME"),
        (f'url: "redis://me:{SECRET}@host:x"', "url", "write redis://host:port/db"),
        ('url: "redis://me@host"', "url", "the url must not contain a user; write username:"),
        ('url: "http://host"', "url", "write redis://host:port/db"),
        ('url: "redis://host/db"', "url", "write redis://host:port/db"),
        (f'url: "redis://host/0?password={SECRET}"', "url", "write redis://host:port/db"),
        ('url: "unix://run/redis.sock"', "url", "write redis://host:port/db"),
        ('url: "unix:///run/redis.sock", mode: cluster', "mode", "mode: cluster needs hosts and ports"),
        ('url: "redis://host/1", mode: cluster', "mode", "a cluster has only database 0; remove the number"),
        ("mode: sentinel", "mode", "mode: sentinel needs sentinels (host:port of each) and service"),
        ("mode: many", "mode", "'many' is not one of single, cluster, sentinel"),
        ("sentinels: [host]", "sentinels", "write each sentinel as host:port"),
        (f"password: {SECRET}", "password", "write env:NAME"),
        ("prefix: 'a{b}'", "prefix", "a prefix may contain letters, digits"),
        ("prefix: 'a*'", "prefix", "a prefix may contain letters, digits"),
        ("part: 1KiB", "part", "a part must be from 4KiB to 64MiB"),
        ("part: 1GiB", "part", "a part must be from 4KiB to 64MiB"),
        ("ttl: 10ms", "ttl", "frames must live for at least a second"),
    )
