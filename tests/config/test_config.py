"""From YAML or plain values to a StackConfig, and from there to an open stack; every refusal in full text."""

from __future__ import annotations

import pathlib
import textwrap
import threading
from typing import ClassVar, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.config.attach import attach
from kvtier_core.config.decode import KINDS
from kvtier_core.config.load import load_config
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import open_stack, open_token_database
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import (
    AllocatorBackend,
    ArenaConfig,
    Backend,
    BackendConfig,
    EvictionConfig,
    OpenContext,
    SerializerConfig,
    TokenDatabaseConfig,
)
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.types import Namespace, Nbytes, Seconds
from kvtier_doctor.schema import schema_of
from kvtier_testing.samples import make_layout

LAYOUT = make_layout((65536,), 16)
CTX = OpenContext(Namespace.of({"model": "m"}), LAYOUT)

#: What the plugins of this file did, in order.
journal: list[str] = []


class Memory(AllocatorBackend):
    handle = "here"

    def __init__(self, ctx):
        self.slot_nbytes = ctx.layout.frame_nbytes
        self.slots = ctx.capacity // self.slot_nbytes
        journal.append(f"open cpu {ctx.capacity}")

    def view(self, slot):
        return memoryview(bytearray(self.slot_nbytes))

    def close(self):
        journal.append("close cpu")


class Shelf(Backend):
    def __init__(self, path, scan_fails):
        self.path = path
        self.scan_fails = scan_fails
        journal.append(f"open {path}")

    contains = read = write = delete = lambda self, *arguments: ()

    def scan(self):
        if self.scan_fails:
            raise BackendError("the index cannot be read")
        return iter(())

    def close(self):
        journal.append(f"close {self.path}")
        raise BackendError("closing failed")


@attrs.frozen
class CpuConfig(ArenaConfig):
    type: ClassVar[str] = "cpu"
    huge: Literal["auto", "on", "off"] = "auto"

    def open(self, ctx):
        return Memory(ctx)

    def attach(self, handle, table):
        raise NotImplementedError


@attrs.frozen
class DiskConfig(BackendConfig):
    type: ClassVar[str] = "disk"
    path: pathlib.Path
    depth: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    fails: Literal["never", "here", "path", "import", "scan"] = "never"

    def open(self, ctx):
        if self.fails == "here":
            raise BackendError("no space left")
        if self.fails == "path":
            raise ConfigError([Problem("", "$.path", f"{self.path} is not writable", "chmod it")])
        if self.fails == "import":
            raise ModuleNotFoundError("No module named 'boto3'")
        return Shelf(self.path, self.fails == "scan")


class Plugin:
    @hookimpl
    def kvtier_backends(self):
        return [CpuConfig, DiskConfig]


@pytest.fixture(autouse=True)
def _fresh_journal():
    journal.clear()


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text: pathlib.Path("kvtier.yaml").write_text(textwrap.dedent(text))


def load(source="kvtier.yaml"):
    return load_config(source, Registry.of(Plugin()))


def complaints(attempt, *args):
    with pytest.raises(ConfigError) as caught:
        attempt(*args)
    return str(caught.value).splitlines()


def test_every_setting_of_a_file_is_read(write):
    write("""\
        version: 1
        chunk_tokens: 64
        load_wait: 500ms
        save_decode: true
        token_database: {type: chained}
        tiers:
          - {type: cpu, capacity: 8GiB, huge: off}
          - type: disk
            path: /var/lib/kvtier
            capacity: 200GiB
            eviction: {type: lru}
            serializer: raw
            threads: 8
            inflight: 2GiB
          - {type: disk, path: /slow, capacity: 1TiB, depth: 3}
    """)
    assert load() == StackConfig(
        tiers=(
            ArenaTierConfig("cpu", CpuConfig("off"), Nbytes(8 << 30), GittinsConfig()),
            StoreTierConfig(
                "disk",
                DiskConfig(pathlib.Path("/var/lib/kvtier")),
                Nbytes(200 << 30),
                LruConfig(),
                RawConfig(),
                8,
                Nbytes(2 << 30),
            ),
            StoreTierConfig("disk#2", DiskConfig(pathlib.Path("/slow"), 3), Nbytes(1 << 40)),
        ),
        chunk_tokens=64,
        token_database=ChainedConfig(),
        load_wait=Seconds(0.5),
        save_decode=True,
    )


def test_plain_values_say_the_same_as_a_file(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8GiB, eviction: lru}]")
    inline = {"version": 1, "tiers": [{"type": "cpu", "capacity": "8GiB", "eviction": {"type": "lru"}}]}
    assert load(inline) == load() == load(pathlib.Path("kvtier.yaml"))


def test_the_file_may_be_in_the_home_directory(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("version: 1\ntiers: [{type: cpu, capacity: 8GiB}]")
    config = load("~/kvtier.yaml")
    assert config.origin("$.tiers[0].capacity") == "~/kvtier.yaml:2"
    assert config.origin("$.tiers[0].eviction") == "default"


@pytest.mark.parametrize("weights", ["full", "sampled", "name:acme-8b of Tuesday"])
def test_how_the_weights_are_identified(write, weights):
    write(f"version: 1\ntiers: [{{type: cpu, capacity: 1GiB}}]\nidentity: {{weights: '{weights}'}}")
    assert load().identity.weights == weights


@pytest.mark.parametrize("weights", ["fast", "Full", "name:", "acme-8b"])
def test_a_name_for_weights_is_distinguished_from_a_misspelling(write, weights):
    write(f"version: 1\ntiers: [{{type: cpu, capacity: 1GiB}}]\nidentity: {{weights: '{weights}'}}")
    assert complaints(load) == [f"kvtier.yaml:3: $.identity.weights: expected full, sampled or name:…, got {weights!r}"]


NO_PATHS = {
    "$STORE/kv": "'$STORE/kv' names an environment variable, which is not expanded; write the path itself",
    "/a/${STORE}": "'/a/${STORE}' names an environment variable, which is not expanded; write the path itself",
    "~/kv": "'~/kv' is not a path: HOME is ''",
    "~nobody-of-that-name/kv": "'~nobody-of-that-name/kv' is not a path: ",
}


@pytest.mark.parametrize(("path", "why"), NO_PATHS.items())
def test_no_path_is_taken_for_another(write, monkeypatch, path, why):
    """Of a tier, and of the configuration itself: no folder is ever named `~` or `$STORE`."""
    monkeypatch.setenv("HOME", "")
    with pytest.raises(ConfigError) as refused:
        load({"version": 1, "tiers": [{"type": "cpu", "capacity": "8GiB", "keep": path}]})
    assert why in str(refused.value) and "$.tiers[0].keep" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert f"{path}: $: cannot be read: {why}" in str(refused.value)


def test_every_problem_of_a_file_is_reported(write):
    write("""\
        version: 2
        chunk_tokens: 0
        load_wate: 2s
        tiers:
          - {type: disk, path: /a, capacity: 500GB, threads: 0}
          - {type: cpu, capcity: 1GiB, serializer: raw}
          - {type: tape, capacity: 1GB, bucket: kv}
          - {type: dsk, capacity: 1GiB}
          - {type: disk, capacity: 1GiB, depth: 0, eviction: lruu}
          - {capacity: 1GiB}
          - disk
    """)
    no_size = "is not a size; write a whole number and B, KiB, MiB, GiB, TiB or PiB"
    assert complaints(load) == [
        "kvtier.yaml:1: $.version: '2' is not one of 1",
        "kvtier.yaml:2: $.chunk_tokens: 'chunk_tokens' must be >= 1: 0",
        "kvtier.yaml:3: $.load_wate: unknown key 'load_wate'; did you mean 'load_wait'?",
        (
            "kvtier.yaml:5: $.tiers[0].type: the first tier must be an arena, but 'disk' is not: "
            "no engine can reach its memory; put an arena first, such as cpu"
        ),
        f"kvtier.yaml:5: $.tiers[0].capacity: '500GB' {no_size}",
        "kvtier.yaml:5: $.tiers[0].threads: 'threads' must be >= 1: 0",
        "kvtier.yaml:6: $.tiers[1]: 'capacity' is missing",
        "kvtier.yaml:6: $.tiers[1].capcity: unknown key 'capcity'; did you mean 'capacity'?",
        (
            "kvtier.yaml:6: $.tiers[1].serializer: unknown key 'serializer'; "
            "known keys: type, capacity, eviction, store_after, packing, keep, huge"
        ),
        "kvtier.yaml:7: $.tiers[2].type: no tier 'tape' is installed (have: cpu, disk, heap)",
        f"kvtier.yaml:7: $.tiers[2].capacity: '1GB' {no_size}",
        "kvtier.yaml:8: $.tiers[3].type: no tier 'dsk' is installed (have: cpu, disk, heap); did you mean 'disk'?",
        (
            "kvtier.yaml:9: $.tiers[4].eviction: no eviction policy 'lruu' is installed "
            "(have: gittins, lru); "
            "did you mean 'lru'?"
        ),
        "kvtier.yaml:9: $.tiers[4]: 'path' is missing",
        "kvtier.yaml:9: $.tiers[4].depth: 'depth' must be >= 1: 0",
        "kvtier.yaml:10: $.tiers[5]: 'type' is missing",
        "kvtier.yaml:11: $.tiers[6]: expected a mapping, found 'disk'",
    ]


@pytest.mark.parametrize("kind", ["read_only", "of_peers"])
def test_a_tier_that_is_only_read_cannot_be_private(tmp_path, kind):
    """A private tier removes frames beyond its capacity, and writes a log of requests into its store."""

    @attrs.frozen
    class OnlyRead(DiskConfig):
        type: ClassVar[str] = "reading"
        read_only: ClassVar[bool] = kind == "read_only"
        of_peers: ClassVar[bool] = kind == "of_peers"

    class Reading:
        @hookimpl
        def kvtier_backends(self):
            return [CpuConfig, OnlyRead]

    tiers = [{"type": "cpu", "capacity": "8MiB"}, {"type": "reading", "capacity": "1GiB", "path": str(tmp_path)}]
    config = load_config({"version": 1, "tiers": tiers}, Registry.of(Reading()))
    assert complaints(open_stack, config, CTX) == [
        "inline: $.tiers[1]: its plugin only reads it, yet calls it private; report that to its authors"
    ]
    assert not list(tmp_path.iterdir())


@attrs.frozen
class LoneConfig(BackendConfig):
    """A store tier that may bring an arena."""

    type: ClassVar[str] = "lone"
    brings: Literal["an arena", "nothing", "an error"] = "an arena"

    def open(self, ctx):
        return Shelf("lone", False)

    def staging_arena(self):
        if self.brings == "an error":
            raise ImportError("No module named 'memory'")
        return (CpuConfig(), Nbytes(8 << 20)) if self.brings == "an arena" else None


class LonePlugin(Plugin):
    @hookimpl
    def kvtier_backends(self):
        return [CpuConfig, LoneConfig]


def load_lone(*tiers, **settings):
    lone = {"type": "lone", "capacity": "1GiB", **settings}
    return load_config({"version": 1, "tiers": [lone, *tiers]}, Registry.of(LonePlugin()))


def test_a_store_tier_may_bring_the_arena_above_it():
    config = load_lone()
    assert [tier.name for tier in config.tiers] == ["cpu", "lone"]
    assert config.arenas[0].capacity == 8 << 20
    assert [config.path_of(number) for number in range(2)] == ["$.tiers[0].staging", "$.tiers[0]"]
    manager = open_stack(config, CTX)
    assert journal == ["open cpu 8MiB", "open lone"]
    manager.close()


def test_an_arena_that_is_not_brought_or_written_too_late():
    no_arena = (
        "inline: $.tiers[0].type: the first tier must be an arena, but 'lone' is not: no engine can reach its memory; "
        "put an arena first, such as cpu"
    )
    assert complaints(lambda: load_lone(brings="nothing")) == [no_arena]
    assert complaints(lambda: load_lone({"type": "cpu", "capacity": "1GiB"})) == [no_arena]
    (failed,) = complaints(lambda: load_lone(brings="an error"))
    assert failed.endswith("cannot provide an arena: No module named 'memory'")


def test_unknown_types_do_not_hide_the_rest():
    assert complaints(load, {"version": 1, "tiers": [{"type": "cpu", "capacity": "1GiB"}, {"type": "tape"}]}) == [
        "inline: $.tiers[1].type: no tier 'tape' is installed (have: cpu, disk, heap)",
    ]


@pytest.mark.parametrize(
    ("source", "sentences"),
    [
        ({"version": 1, "tiers": []}, ["inline: $.tiers: a stack needs at least one tier"]),
        ({}, ["inline: $: 'version' is missing", "inline: $: 'tiers' is missing"]),
        (
            {"version": 1, "tiers": [{"type": "disk", "path": "/a", "capacity": "1GiB"}]},
            [
                (
                    "inline: $.tiers[0].type: the first tier must be an arena, but 'disk' is not: no engine can reach "
                    "its "
                    "memory; put an arena first, such as cpu"
                )
            ],
        ),
        (
            {"version": 1, "tiers": [{"type": "cpu", "capacity": "1GiB", "serializer": "raw"}]},
            [
                "inline: $.tiers[0].serializer: unknown key 'serializer'; "
                "known keys: type, capacity, eviction, store_after, packing, keep, huge",
            ],
        ),
        (
            {"version": 1, "tiers": [{"type": "cpu", "capacity": "1GiB"}], "token_database": "chain"},
            [
                (
                    "inline: $.token_database: no token database 'chain' is installed (have: chained); "
                    "did you mean 'chained'?"
                )
            ],
        ),
    ],
)
def test_invalid_stacks(source, sentences):
    assert complaints(load, source) == sentences


def test_the_chunk_must_suit_the_engine(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8GiB}]\nchunk_tokens: 100")
    config = load()
    config.check_engine(50)
    assert complaints(config.check_engine, 48) == [
        "kvtier.yaml:3: $.chunk_tokens: 100 is not a multiple of the engine's block size 48; write 96 or 144"
    ]
    assert complaints(config.check_engine, 128) == [
        "kvtier.yaml:3: $.chunk_tokens: 100 is not a multiple of the engine's block size 128; write 128"
    ]
    assert complaints(attrs.evolve(config, places={}).check_engine, 128) == [
        "StackConfig: $.chunk_tokens: 100 is not a multiple of the engine's block size 128; write 128"
    ]


def test_invalid_numbers_of_tokens(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8GiB}]\nchunk_tokens: many")
    assert complaints(load) == [
        "kvtier.yaml:3: $.chunk_tokens: expected a whole number or 'auto', found 'many'",
    ]


#: Bytes of one token's KV in one layer.
LLAMA_8B = 2 * 8 * 128 * 2  # keys and values, 8 heads of 128, 16 bits
QWEN_HALF_B = 2 * 2 * 64 * 2
MLA = (512 + 64) * 2  # one latent vector and its positions, in 16 bits, for all heads


@pytest.mark.parametrize(
    ("layers", "token_nbytes", "block_size", "tokens"),
    [
        (32, LLAMA_8B, 16, 16),  # 2 MiB a block
        (32, LLAMA_8B // 2, 16, 16),  # its KV in 8 bits: 1 MiB, which is enough
        (32, LLAMA_8B, 128, 128),
        (24, QWEN_HALF_B, 16, 96),  # 192 KiB a block; five are less than 1 MiB
        (61, MLA, 64, 64),  # DeepSeek-V3
        (27, MLA, 16, 48),  # DeepSeek-V2-Lite: 486 KiB a block
        (2, QWEN_HALF_B, 16, 256),  # would take 1024
        (2, QWEN_HALF_B, 96, 192),  # no more than 256
        (2, QWEN_HALF_B, 512, 512),  # no less than a block
    ],
)
def test_auto_is_the_shortest_chunk_whose_frame_is_a_mebibyte(write, layers, token_nbytes, block_size, tokens):
    write("version: 1\ntiers: [{type: cpu, capacity: 8GiB}]\nsave_decode: true")
    config = load()
    config.check_engine(block_size)
    sized = config.sized(block_size, block_size * layers * token_nbytes)
    assert sized == attrs.evolve(config, chunk_tokens=tokens)
    assert sized.origin("$.save_decode") == "kvtier.yaml:3"


def test_a_written_number_of_tokens_stays(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8GiB}]\nchunk_tokens: 512")
    assert load().sized(16, 1) == load()


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-")}


def test_a_stack_opens_and_closes(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8MiB}, {type: disk, path: /d, capacity: 1GiB, threads: 2}]")
    manager = open_stack(load(), CTX)
    assert [(usage.tier, usage.capacity) for usage in manager.usage()] == [
        ("cpu", 7 * LAYOUT.frame_nbytes),
        ("disk", 1 << 30),
    ]
    assert threads() == {"kvtier-disk-0", "kvtier-disk-1", "kvtier-seal-0"}
    manager.close()
    assert journal == ["open cpu 8MiB", "open /d", "close /d", "close cpu"]
    assert not threads()


def test_all_tiers_open_or_none_and_every_reason_is_reported(write):
    write("""\
        version: 1
        tiers:
          - {type: cpu, capacity: 8MiB}
          - {type: disk, path: /a, capacity: 1GiB}
          - {type: disk, path: /b, capacity: 1GiB, fails: here}
          - type: disk
            capacity: 1GiB
            path: /c
            fails: path
          - {type: disk, path: /d, capacity: 1GiB, fails: import}
          - {type: cpu, capacity: 1000KiB}
          - {type: disk, path: /e, capacity: 1MiB}
          - {type: disk, path: /f, capacity: 1GiB, inflight: 1MiB}
    """)
    assert complaints(open_stack, load(), CTX) == [
        "kvtier.yaml:5: $.tiers[2]: no space left",
        "kvtier.yaml:8: $.tiers[3].path: /c is not writable; chmod it",
        "kvtier.yaml:10: $.tiers[4]: No module named 'boto3'",
        "kvtier.yaml:11: $.tiers[5].capacity: 1000KiB is smaller than one chunk (1.1MiB); write at least 1028KiB",
        "kvtier.yaml:12: $.tiers[6].capacity: 1MiB is smaller than one chunk (1.1MiB); write at least 1028KiB",
        "kvtier.yaml:13: $.tiers[7].inflight: 1MiB is smaller than one chunk (1.1MiB); write at least 1028KiB",
    ]
    assert journal == ["open cpu 8MiB", "open /a", "close /a", "close cpu"]


def test_engines_that_share_a_configuration_share_the_capacities(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8MiB}, {type: disk, path: /d, capacity: 1GiB}]")
    manager = open_stack(load(), attrs.evolve(CTX, replica=1, replicas=3))
    share = (8 << 20) // 3
    assert [usage.capacity for usage in manager.usage()] == [
        share // LAYOUT.frame_nbytes * LAYOUT.frame_nbytes,
        (1 << 30) // 3,
    ]
    assert journal[0] == f"open cpu {share}B"
    manager.close()


def test_a_capacity_that_holds_no_chunk_when_it_is_divided(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8MiB}, {type: disk, path: /d, capacity: 3MiB}]")
    assert complaints(open_stack, load(), attrs.evolve(CTX, replica=0, replicas=3)) == [
        "kvtier.yaml:2: $.tiers[1].capacity: 3MiB, divided among 3 data parallel replicas, is smaller than one chunk "
        "(1.1MiB); write at least 3084KiB",
    ]


def test_threads_are_bounded(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8MiB}, {type: disk, path: /d, capacity: 1GiB, threads: 100000}]")
    assert complaints(load) == ["kvtier.yaml:2: $.tiers[1].threads: 'threads' must be <= 64: 100000"]


def test_a_tier_that_cannot_start_closes_all(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8MiB}, {type: disk, path: /d, capacity: 1GiB, fails: scan}]")
    assert complaints(open_stack, load(), CTX) == ["kvtier.yaml:2: $.tiers[1]: the index cannot be read"]
    assert journal == ["open cpu 8MiB", "open /d", "close /d", "close cpu"]
    assert not threads()


@pytest.mark.parametrize("fails", ["here", "path", "import", "scan"])
def test_a_stack_goes_on_without_a_tier_that_is_not_required(write, fails, caplog):
    write(f"""\
        version: 1
        tiers:
          - {{type: cpu, capacity: 8MiB}}
          - {{type: disk, path: /a, capacity: 1GiB, fails: {fails}, required: false}}
          - {{type: disk, path: /b, capacity: 1GiB, required: false}}
    """)
    stack = open_stack(load(), CTX)
    assert [usage.tier for usage in stack.usage()] == ["cpu", "disk#2"]
    (said,) = [each for each in caplog.messages if "required" in each]
    assert said.startswith("kvtier: disk: not opened, and not required: kvtier.yaml:4: $.tiers[1]")
    opened = ["open cpu 8MiB", *(["open /a"] if fails == "scan" else []), "open /b"]
    assert journal == [*opened, *(["close /a"] if fails == "scan" else [])]
    stack.close()
    assert sorted(journal[-2:]) == ["close /b", "close cpu"] and not threads()


def test_only_a_store_tier_may_be_missing(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8MiB, required: false}]")
    assert complaints(load)[0].startswith("kvtier.yaml:2: $.tiers[0].required: ")


# -- plugins that do not keep to the interfaces -----------------------------------------------------


class WildMemory(Memory):
    """``says`` are attributes that it has instead of the right ones."""

    def __init__(self, ctx, says):
        super().__init__(ctx)
        for name, value in says.items():
            setattr(self, name, value)


def wild(value):
    """Returns the value, or raises an error like it: one that is kept would keep the frames it went through."""
    if isinstance(value, BaseException):
        raise type(value)(*value.args)
    return value


#: What the plugins of the type `wild` return or raise; set by each test.
DOES: dict[str, object] = {}


@attrs.frozen
class WildArenaConfig(ArenaConfig):
    type: ClassVar[str] = "wild-arena"

    def open(self, ctx):
        return WildMemory(ctx, DOES["says"]) if "says" in DOES else wild(DOES["open"])

    def attach(self, handle, table):
        return wild(DOES["attach"])


@attrs.frozen
class WildConfig(BackendConfig):
    type: ClassVar[str] = "wild"

    def open(self, ctx):
        return wild(DOES["open"])


@attrs.frozen
class WildEvictionConfig(EvictionConfig):
    type: ClassVar[str] = "wild"

    def open(self):
        return wild(DOES["open"])


@attrs.frozen
class WildSerializerConfig(SerializerConfig):
    type: ClassVar[str] = "wild"

    def open(self, ctx):
        return wild(DOES["open"])


@attrs.frozen
class WildTokenDatabaseConfig(TokenDatabaseConfig):
    type: ClassVar[str] = "wild"

    def open(self, namespace, chunk_tokens):
        return wild(DOES["open"])


class WildPlugin(Plugin):
    @hookimpl
    def kvtier_backends(self):
        return [CpuConfig, DiskConfig, WildArenaConfig, WildConfig]

    @hookimpl
    def kvtier_eviction_policies(self):
        return [WildEvictionConfig]

    @hookimpl
    def kvtier_serializers(self):
        return [WildSerializerConfig]

    @hookimpl
    def kvtier_token_databases(self):
        return [WildTokenDatabaseConfig]


HOT = "{type: cpu, capacity: 8MiB}"
WILD = {
    "arena": (f"[{HOT}, {{type: wild-arena, capacity: 8MiB}}]", "tier wild-arena", "AllocatorBackend", ""),
    "store tier": (f"[{HOT}, {{type: wild, capacity: 1GiB}}]", "tier wild", "Backend", ""),
    "eviction policy": (
        f"[{HOT}, {{type: disk, path: /d, capacity: 1GiB, eviction: wild}}]",
        "the eviction of tier disk",
        "EvictionPolicy",
        ".eviction",
    ),
    "serializer": (
        f"[{HOT}, {{type: disk, path: /d, capacity: 1GiB, serializer: wild}}]",
        "the serializer of tier disk",
        "Serializer",
        ".serializer",
    ),
}
RAISED = [ZeroDivisionError("division by zero"), KeyError("x"), SystemExit(3), ConnectionRefusedError("111")]


def opened_wild(write, tiers, **does):
    DOES.clear()
    DOES.update(does)
    write(f"version: 1\nchunk_tokens: 16\ntiers:\n  {tiers}")
    return load_config("kvtier.yaml", Registry.of(WildPlugin()))


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("kind", WILD)
def test_an_error_that_no_plugin_may_raise_is_a_problem_with_a_place(write, kind, error):
    tiers, what, _, key = WILD[kind]
    config = opened_wild(write, tiers, open=error)
    told = f"plugin WildPlugin cannot open {what}: {type(error).__name__}: {error}"
    assert complaints(open_stack, config, CTX) == [f"kvtier.yaml:4: $.tiers[1]{key}: {told}"]
    assert journal == ["open cpu 8MiB", "close cpu"]


#: Without a serializer frames are stored as they are.
NO_BACKENDS = [
    (kind, value) for kind in WILD for value in (None, 7, WildConfig) if (kind, value) != ("serializer", None)
]


@pytest.mark.parametrize(("kind", "value"), NO_BACKENDS)
def test_a_plugin_that_returns_no_backend_is_a_problem_with_a_place(write, kind, value):
    tiers, what, expected, key = WILD[kind]
    config = opened_wild(write, tiers, open=value)
    found = {None: "None", 7: "a value of type int", WildConfig: "a value of type ABCMeta"}[value]
    why = f"plugin WildPlugin cannot open {what}: returned {found}, expected {expected}"
    assert complaints(open_stack, config, CTX) == [f"kvtier.yaml:4: $.tiers[1]{key}: {why}"]
    assert journal == ["open cpu 8MiB", "close cpu"]


@pytest.mark.parametrize("value", [None, ZeroDivisionError("division by zero")], ids=repr)
def test_a_token_database_that_cannot_be_opened(write, value):
    config = opened_wild(write, f"[{HOT}]\ntoken_database: wild", open=value)
    told = "returned None, expected TokenDatabase" if value is None else "ZeroDivisionError: division by zero"
    why = f"kvtier.yaml:5: $.token_database: plugin WildPlugin cannot open the token database: {told}"
    assert complaints(open_stack, config, CTX) == complaints(open_token_database, config, CTX.namespace) == [why]
    assert journal == ["open cpu 8MiB", "close cpu"]


FRAME = LAYOUT.frame_nbytes
SAYS = {
    "no slots": ({"slots": 0}, "an arena must have at least one slot, got 0"),
    "slots that are no number": ({"slots": "7"}, "an arena must have at least one slot, got '7'"),
    "other slots": ({"slot_nbytes": 4096}, f"a slot must hold one frame of {FRAME} bytes, got 4096"),
    "too much": ({"slots": 8}, f"8 slots of {FRAME} bytes exceed its capacity of 8MiB"),
    "short views": (
        {"view": lambda slot: memoryview(bytearray(FRAME - 1))},
        f"the view of slot 0 is not a writable memoryview of {FRAME} bytes",
    ),
    "views that cannot be written": (
        {"view": lambda slot: memoryview(bytes(FRAME))},
        f"the view of slot 0 is not a writable memoryview of {FRAME} bytes",
    ),
    "views of some slots": (
        {"view": lambda slot: memoryview(bytearray(FRAME if slot < 3 else 0))},
        f"the view of slot 6 is not a writable memoryview of {FRAME} bytes",
    ),
    "bytes instead of views": (
        {"view": lambda slot: bytearray(FRAME)},
        f"the view of slot 0 is not a writable memoryview of {FRAME} bytes",
    ),
    "a handle that is no text": ({"handle": 7}, "handle must be a string, got 7"),
    "a view that fails": ({"view": lambda slot: [][slot]}, "IndexError: list index out of range"),
}


@pytest.mark.parametrize(("says", "why"), SAYS.values(), ids=SAYS)
def test_an_arena_that_contradicts_the_interface_is_not_used(write, says, why):
    config = opened_wild(write, "[{type: wild-arena, capacity: 8MiB}]", says=says)
    told = f"kvtier.yaml:4: $.tiers[0]: plugin WildPlugin cannot open tier wild-arena: {why}"
    assert complaints(open_stack, config, CTX) == [told]
    assert journal == ["open cpu 8MiB", "close cpu"]


class Stubborn(Shelf):
    def __init__(self):
        super().__init__("stubborn", False)

    def scan(self):
        raise OSError("the index is gone")

    def close(self):
        super().close()
        raise KeyError("closing failed unexpectedly")


def test_an_unexpected_error_at_start_closes_all(write):
    config = opened_wild(write, f"[{HOT}, {{type: wild, capacity: 1GiB}}]", open=Stubborn())
    why = "plugin WildPlugin cannot start tier wild: OSError: the index is gone"
    assert complaints(open_stack, config, CTX) == [f"kvtier.yaml:4: $.tiers[1]: {why}"]
    assert sorted(journal) == ["close cpu", "close stubborn", "open cpu 8MiB", "open stubborn"]
    assert not threads()


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (None, "plugin WildPlugin cannot attach to tier wild-arena: returned None, expected Mover"),
        (OSError("gone"), "plugin WildPlugin cannot attach to tier wild-arena: OSError: gone"),
        (BackendError("cannot reach the arena"), "cannot reach the arena"),
    ],
    ids=repr,
)
def test_a_worker_that_cannot_reach_an_arena_says_why(write, does, why):
    (tier,) = opened_wild(write, "[{type: wild-arena, capacity: 8MiB}]", attach=does).arenas
    assert complaints(attach, tier, "here", None) == [f"kvtier.yaml:4: $.tiers[0]: {why}"]


def test_a_stack_says_which_plugins_were_chosen(write):
    write("version: 1\ntiers: [{type: cpu, capacity: 8MiB}, {type: disk, path: /d, capacity: 1GiB, eviction: lru}]")
    assert list(load().describe()) == [
        "cpu: Plugin, eviction policy gittins",
        "disk: Plugin, eviction policy lru, serializer raw",
    ]


@pytest.mark.parametrize("key", ["capacity", "inflight"])
def test_a_capacity_of_zero_is_refused(write, key):
    write(f"version: 1\ntiers: [{HOT}, {{type: disk, path: /d, {'capacity: 1GiB, ' * (key != 'capacity')}{key}: 0B}}]")
    assert complaints(load) == [f"kvtier.yaml:2: $.tiers[1].{key}: '{key}' must be greater than 0B"]


KEYS = (attrs.fields_dict(ArenaTierConfig) | attrs.fields_dict(StoreTierConfig)).keys() - {"name", "config", "source"}


def test_what_is_reserved_are_keys_of_the_core():
    assert KINDS["tier"].core_keys < KEYS | {"type"}


@pytest.mark.parametrize("key", sorted(KEYS - KINDS["tier"].core_keys))
def test_a_tier_that_was_published_before_a_key_of_the_core_keeps_its_field(key):
    body = {"type": "earlier", "open": DiskConfig.open}
    earlier = attrs.make_class("EarlierConfig", {key: attrs.field(type=int)}, (BackendConfig,), class_body=body)
    registry = Registry.of(type("Earlier", (), {"kvtier_backends": hookimpl(lambda self: [CpuConfig, earlier])})())
    stores = {"type": "earlier", "capacity": "1GiB", key: 3}
    written = {"version": 1, "tiers": [{"type": "cpu", "capacity": "8MiB"}, stores]}
    (tier,) = load_config(written, registry).stores
    assert getattr(tier.config, key) == 3
    assert tier == StoreTierConfig("earlier", tier.config, Nbytes(1 << 30))
    assert Draft7Validator(schema_of(registry)).is_valid(written)


words = st.sampled_from(["version", "tiers", "type", "capacity", "cpu", "disk", "1", "8GiB", *":-{}[],~&*!<?|'\"%\\"])
yaml_like = st.lists(words | st.sampled_from(["\n", "\n  ", " ", ": "]) | st.text(max_size=3)).map("".join)


@given(st.text() | yaml_like)
def test_any_text_is_a_stack_or_a_list_of_problems(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(load(path), StackConfig)
    except ConfigError as error:
        assert error.problems
