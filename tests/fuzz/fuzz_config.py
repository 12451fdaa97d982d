"""Configuration files of any bytes: a StackConfig, or a ConfigError that tells what is wrong. Nothing else."""

from __future__ import annotations

import textwrap

import atheris
import harness

with atheris.instrument_imports(include=["kvtier_core", "yaml"]):
    import kvtier_cpu.plugin
    import kvtier_disk.plugin
    from kvtier_core.config.load import load_config
    from kvtier_core.config.model import StackConfig
    from kvtier_core.config.registry import Registry
    from kvtier_core.errors import ConfigError

REGISTRY = Registry.of(kvtier_cpu.plugin, kvtier_disk.plugin)
FILE = harness.new_folder("input") / "kvtier.yaml"

SEEDS = [
    """\
    version: 1
    chunk_tokens: 64            # tokens
    load_wait: 500ms
    save_decode: true
    token_database: {type: chained}
    tiers:
      - {type: cpu, capacity: 8GiB, huge_pages: off, eviction: lru}
      - type: disk
        path: "/var/lib/kvtier"
        capacity: 200GiB
        eviction: {type: lru}
        serializer: raw
        threads: 8
        inflight: 2GiB
        min_free: 0B
    """,
    'version: 1\ntiers: [{type: heap, capacity: 1MiB}, {type: disk, capacity: 1PiB, path: "~root/\\ud800"}]',
    "a: &a [x, x]\nb: &b [*a, *a]\n<<: *b\nversion: !!python/object/apply:os.system [true]",
    "%YAML 1.1\n%TAG ! tag:example.org,2000:\n---\n? |2-\n   text\n: >+\n  more\n...\n",
    "\ufeffversion: 1\r\n'tiers': \"\\x41\\u0041\\U00000041\\\n  \"\r\n",
    "[[[[{a: [? b : c, 'd', {e: }]}]]]]",
]
WORDS = [
    *("version", "tiers", "type", "capacity", "chunk_tokens", "load_wait", "save_decode", "token_database", "eviction"),
    *("serializer", "threads", "inflight", "path", "direct", "min_free", "huge_pages", "cpu", "disk", "heap", "raw"),
    *("lru", "chained", "auto", "1GiB", "2s", "true", "null", "~", "<<", "---", "...", "%YAML", "%TAG", "!!"),
    *("&a", "*a", "|2-", ">+", ": ", "- ", "? ", "\\ud800", "\\UFFFFFFFF"),
    *("\u2028", "\ufeff", "\x85", "\t", "\r\n"),
]


def one_input(data: bytes) -> None:
    FILE.write_bytes(data)
    try:
        config = load_config(FILE, REGISTRY)
    except ConfigError as error:
        assert error.problems and str(error), "an error without a problem"
        return
    assert isinstance(config, StackConfig)
    assert repr(config) and config.origin("$.version") != "default"


if __name__ == "__main__":
    seeds = [textwrap.dedent(text).encode() for text in SEEDS]
    harness.fuzz(one_input, seeds, longest=2048, words=[word.encode() for word in WORDS])
