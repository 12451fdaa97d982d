"""What others may have written: frames, configuration files, weights. Each is read as it is meant, or refused."""

from __future__ import annotations

import itertools
import json
import struct
import textwrap
import tracemalloc
import zlib
from typing import ClassVar

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sizes import LONG

import kvtier_cpu.plugin
import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.frames.format import payload_of, verify
from kvtier_core.frames.identity import RAW, CodecIdentity
from kvtier_core.hookspecs import hookimpl
from kvtier_core.identity import weights
from kvtier_core.interfaces import BackendConfig
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_context, make_key, make_namespace, same

pytestmark = pytest.mark.long

#: The same examples at every run; `make fuzz` is where new ones are looked for.
FIXED = settings(derandomize=True, deadline=None, max_examples=400 * LONG)


def mutated(seeds, tokens, join):
    """One of the seeds, with pieces cut out, put in and doubled."""
    edit = st.tuples(st.floats(0, 1), st.integers(0, 40), tokens)

    def apply(seed, edits):
        for where, cut, token in edits:
            at = int(where * len(seed))
            seed = join([seed[:at], token, seed[at + cut :]])
        return seed

    return st.builds(apply, st.sampled_from(seeds), st.lists(edit, min_size=1, max_size=6))


# -- frames --------------------------------------------------------------------------------------------

NAMESPACE, KEY = make_namespace(), make_key(0)
PAYLOAD = bytes(range(200))
TRUE = {
    "magic": b"kvtier\r\n",
    "version": 2,
    "flags": 1,
    "nbytes": len(PAYLOAD),
    "namespace": NAMESPACE.digest,
    "key": KEY,
    "codec": b"raw".ljust(64, b"\0"),
    "options": bytes(32),
    "payload": zlib.crc32(PAYLOAD),
    "decoded": zlib.crc32(PAYLOAD),
}
OTHER_CODEC = CodecIdentity("zip", bytes(range(32)), lossless=True)
FIELDS = struct.Struct("<8sHHQ32s32s64s32sII")
HEADER_NBYTES = FIELDS.size + 4

u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
digests = st.binary(min_size=32, max_size=32)
LIES = {
    "magic": st.binary(min_size=8, max_size=8),
    "version": u16,
    "flags": u16,
    "nbytes": st.integers(0, 300) | u64,
    "namespace": st.just(make_namespace("other").digest) | digests,
    "key": st.just(make_key(1)) | digests,
    "codec": st.just(b"zip".ljust(64, b"\0")) | st.binary(min_size=64, max_size=64),
    "options": digests,
    "payload": u32,
    "decoded": u32,
}
#: Two lies at most, so that each field stands alone between a frame and its reader often enough.
lies = st.just({}) | st.sampled_from(list(LIES)).flatmap(lambda name: LIES[name].map(lambda value: {name: value}))
claims = st.builds(lambda one, other: TRUE | one | other, lies, lies)


def is_true(claim, found, asked_nbytes):
    """Is this the frame asked for? Written from the format, not from the code."""
    free = {"nbytes": len(PAYLOAD), "payload": TRUE["payload"], "decoded": TRUE["decoded"]}
    if {**claim, **free} != TRUE or asked_nbytes not in (None, claim["nbytes"]):
        return False
    payload = found[FRAME_ALIGNMENT:][: claim["nbytes"]]
    whole = len(payload) == claim["nbytes"] and claim["payload"] == claim["decoded"] == zlib.crc32(payload)
    return whole and found[FIELDS.size : HEADER_NBYTES] == struct.pack("<I", zlib.crc32(found[: FIELDS.size]))


@FIXED
@given(
    claim=claims,
    payload=st.just(PAYLOAD) | st.binary(max_size=300),
    asked_nbytes=st.sampled_from([None, len(PAYLOAD)]),
    fits=st.booleans(),
    cut=st.none() | st.integers(0, FRAME_ALIGNMENT + 300),
)
@example(claim=TRUE, payload=PAYLOAD, asked_nbytes=200, fits=True, cut=None)
@example(claim=TRUE, payload=PAYLOAD, asked_nbytes=None, fits=True, cut=FRAME_ALIGNMENT + 199)
@example(claim=TRUE | {"nbytes": 199}, payload=PAYLOAD, asked_nbytes=200, fits=True, cut=None)
@example(claim=TRUE | {"nbytes": 199}, payload=PAYLOAD, asked_nbytes=None, fits=True, cut=None)
@example(claim=TRUE | {"nbytes": (1 << 64) - 1}, payload=PAYLOAD, asked_nbytes=None, fits=True, cut=None)
@example(claim=TRUE | {"nbytes": 0}, payload=b"", asked_nbytes=None, fits=True, cut=None)
def test_no_claim_is_believed(claim, payload, asked_nbytes, fits, cut):
    if fits and (claim["payload"], claim["decoded"]) == (TRUE["payload"], TRUE["decoded"]):
        claim = claim | dict.fromkeys(("payload", "decoded"), zlib.crc32(payload[: claim["nbytes"]]))
    fields = FIELDS.pack(*claim.values())
    checksum = zlib.crc32(fields) if fits else 0
    whole = (fields + struct.pack("<I", checksum)).ljust(FRAME_ALIGNMENT, b"\0") + payload
    found = memoryview(whole)[:cut]
    error = verify(found, NAMESPACE, KEY, payload_nbytes=asked_nbytes)
    assert (error is None) == (len(found) >= FRAME_ALIGNMENT and is_true(claim, bytes(found), asked_nbytes))
    if error is None:
        assert same(payload_of(found), payload[: claim["nbytes"]])
    # What lies behind the view, here the rest of the frame, has no say.
    assert verify(memoryview(bytes(found)), NAMESPACE, KEY, payload_nbytes=asked_nbytes) is error


@FIXED
@given(st.binary(max_size=300), st.integers(0, 2 * FRAME_ALIGNMENT))
def test_no_garbage_is_a_frame(garbage, nbytes):
    found = memoryview((garbage * (nbytes // max(1, len(garbage)) + 1))[:nbytes])
    for codec, payload_nbytes in ((RAW, len(PAYLOAD)), (RAW, None), (OTHER_CODEC, None)):
        assert verify(found, NAMESPACE, KEY, codec=codec, payload_nbytes=payload_nbytes) is not None
    if len(found) >= FRAME_ALIGNMENT:
        assert len(payload_of(found)) <= len(found) - FRAME_ALIGNMENT


# -- configuration files -------------------------------------------------------------------------------


@attrs.frozen
class OddConfig(BackendConfig):
    """A field of every type that ours do not have."""

    type: ClassVar[str] = "odd"
    ratio: float = 1.0
    names: tuple[str, ...] = ()
    count: int | None = None

    def open(self, ctx):
        raise NotImplementedError


class Odd:
    @hookimpl
    def kvtier_backends(self):
        return [OddConfig]


REGISTRY = Registry.of(kvtier_cpu.plugin, kvtier_disk.plugin, Odd())
YAML = [
    textwrap.dedent(text)
    for text in (
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
        "version: 1\ntiers: [{type: heap, capacity: 1MiB}, {type: odd, capacity: 1GiB, ratio: 1.5, names: [a, b]}]",
    )
]
TOKENS = [
    *"-:?,[]{}#&*!|>'\"%@`~ \t\n\r\0\x85\u2028\ufeff\ud800",
    *("---", "...", "<<: ", "? ", "- ", ": ", "&a ", "*a", "!!", "!", "!<x>", "|2", ">-", "%YAML 1.1\n", "%TAG ! x\n"),
    *('"\\ud800"', '"\\UFFFFFFFF"', '"~\\ud800"', "~nobody", "0x10", "1e999", ".inf", "-1", "9" * 30, "\u0663GiB"),
    *("version", "tiers", "type", "capacity", "cpu", "disk", "odd", "ratio", "names", "count", "null", "yes", "1PiB"),
]


def load(source):
    return load_config(source, REGISTRY)


def stack_or_problems(source):
    """The only two ways that loading may end; both can be shown."""
    try:
        config = load(source)
    except ConfigError as error:
        assert error.problems
        assert str(error)
        return error
    assert isinstance(config, StackConfig)
    assert repr(config)
    return config


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "kvtier.yaml"


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return path


def complaint(path, text):
    with pytest.raises(ConfigError) as caught:
        load(written(path, text))
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize("text", YAML)
def test_the_seeds_are_stacks(path, text):
    assert isinstance(load(written(path, text)), StackConfig)


@FIXED
@given(text=mutated(YAML, st.sampled_from(TOKENS) | st.text(max_size=4), "".join))
def test_a_mutated_file_is_a_stack_or_a_list_of_problems(path, text):
    stack_or_problems(written(path, text))


@FIXED
@given(text=st.binary(max_size=200) | mutated([text.encode() for text in YAML], st.binary(max_size=4), b"".join))
def test_any_bytes_are_a_stack_or_a_list_of_problems(path, text):
    stack_or_problems(written(path, text))


numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**9)])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
places = st.sampled_from(
    [("version",), ("tiers",), ("load_wait",), ("token_database",), *(("tiers", i) for i in (0, 1))]
    + [("tiers", 0, key) for key in ("type", "capacity", "huge_pages", "eviction", "more")]
    + [("tiers", 1, key) for key in ("path", "threads", "inflight", "serializer", "min_free")]
    + [("tiers", 2, key) for key in ("ratio", "names", "count")]
)


@FIXED
@given(places, json_values)
@example(("tiers", 2, "ratio"), 10**400)
@example(("tiers", 1, "path"), "~\ud800")
def test_any_plain_values_are_a_stack_or_a_list_of_problems(place, value):
    """As vLLM hands them over: from JSON, so of any size and of any depth."""
    config = {
        "version": 1,
        "tiers": [
            {"type": "cpu", "capacity": "8GiB"},
            {"type": "disk", "capacity": "8GiB", "path": "/kv"},
            {"type": "odd", "capacity": "8GiB"},
        ],
    }
    inner = config
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    stack_or_problems(config)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system",
        "!!python/object/new:subprocess.Popen",
        "!!python/name:os.system",
        "!!python/module:antigravity",
        "!<tag:yaml.org,2002:python/object/apply:os.system>",
        "!!map",
        "!mine",
    ],
)
@pytest.mark.parametrize("where", ["{tag} [touch {proof}]", "tiers: {tag} [touch {proof}]", "{tag} [touch {proof}]: 1"])
def test_no_tag_is_obeyed(path, tag, where):
    proof = path.with_name("executed")
    assert complaint(path, where.format(tag=tag, proof=proof)) == ":1: $: tags are not allowed"
    assert not proof.exists()


def test_a_billion_laughs_are_refused(path):
    bomb = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for last, this in itertools.pairwise("abcdefghi"):
        bomb.append(f"{this}: &{this} [{', '.join([f'*{last}'] * 9)}]")
    assert complaint(path, "\n".join(bomb)) == ":1: $: anchors and aliases are not allowed"
    merge = "version: 1\ntiers: []\n<<: {chunk_tokens: 1}"
    assert ':3: $["<<"]: merge keys are not allowed' in complaint(path, merge)


@pytest.mark.parametrize("opening", ["[", "{", "- ", "? ", "[{a: ", "{a: ["])
def test_no_depth_is_too_deep_to_be_refused(path, opening):
    for depth in (20, 1000, 100_000):
        assert "nested too deeply" in complaint(path, opening * depth)


def test_no_depth_of_plain_values_is_too_deep_to_be_refused():
    for wrap in (lambda value: [value], lambda value: {"a": value}):
        value = None
        for _ in range(100_000):
            value = wrap(value)
        assert "nested too deeply" in str(stack_or_problems({"version": 1, "tiers": value}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", ":1: $: the file is empty; write version: 1 and tiers"),
        (b"version: 1\ntiers: \0", ":2: $: character 0x0 is not allowed"),
        (b"version: 1\n\ttiers: []", ":2: $: "),
        (YAML[1].encode("utf-16"), ": $: cannot be read: "),
        (b"version: 1\n# \xff", ": $: cannot be read: "),
        (b"version: 1\n--- \nversion: 1", ":2: $: expected a single document"),
        ('"\\UFFFFFFFF": 1', ": $: not YAML: "),
        (f"%YAML {'9' * 5000}.1\n--- 1", ": $: not YAML: "),
        ("version: 1\nversion: 1", ":2: $.version: written twice"),
        ("a" * 1_000_000, ":1: $: expected a mapping"),
    ],
)
def test_foreign_files_are_reported_by_line(path, text, why):
    assert why in complaint(path, text)


def test_byte_order_marks_and_other_line_ends_are_accepted(path):
    """A byte order mark, other line ends, a path in any script."""
    text = "\ufeff" + YAML[0].replace("/var/lib/kvtier", "/däten/キャッシュ/🦆").replace("\n", "\r\n")
    config = load(written(path, text))
    assert str(config.tiers[1].config.path) == "/däten/キャッシュ/🦆"
    assert config.origin("$.tiers[1].path") == f"{path}:9"


@pytest.mark.parametrize("text", ["~\\ud800", "/kv/\\ud800", "/kv/\\0", "~no-such-user/kv"])
def test_a_path_that_no_file_can_have_is_reported(path, text):
    """Half a surrogate pair is no name in any file system, for one."""
    tiers = f'- {{type: cpu, capacity: 1GiB}}\n- {{type: disk, capacity: 1GiB, path: "{text}"}}'
    assert ":4: $.tiers[1].path: " in complaint(path, f"version: 1\ntiers:\n{tiers}")


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 400, "9" * 4300, "9" * 4301, "1" + "0" * 100_000, "\u0663"])
@pytest.mark.parametrize("unit", ["B", "PiB"])
def test_a_size_that_no_machine_has_is_reported(path, digits, unit):
    text = f"version: 1\ntiers:\n- type: cpu\n  capacity: {digits}{unit}"
    assert ":4: $.tiers[0].capacity: " in complaint(path, text)


@pytest.mark.parametrize("number", ["9" * 19, "9" * 5000, "0x10", "1_000", "1e3", "007", "\u0663", "1.0", ".inf"])
def test_values_that_are_not_integers_are_reported(path, number):
    text = f"version: 1\ntiers: [{{type: heap, capacity: 1GiB}}]\nchunk_tokens: {number}"
    assert ":3: $.chunk_tokens: " in complaint(path, text)


@pytest.mark.parametrize("wait", ["9" * 400 + "s", "9" * 5000 + "ms", "\u0663s", "-1s", "nan s", "inf s"])
def test_values_that_are_not_durations_are_reported(path, wait):
    """More seconds than a float holds are none: a request would wait for ever."""
    text = f"version: 1\ntiers: [{{type: heap, capacity: 1GiB}}]\nload_wait: {wait}"
    assert ":3: $.load_wait: " in complaint(path, text)


@pytest.mark.parametrize("capacity", ["1PiB", "8191PiB", "8192PiB", "99999999PiB"])
@pytest.mark.parametrize("tier", [{"type": "cpu"}, {"type": "cpu", "huge_pages": "off"}, {"type": "heap"}])
def test_a_stack_that_is_too_large_is_a_config_error(tier, capacity):
    """Whether the file is refused, or the opening."""
    with pytest.raises(ConfigError, match="capacity|memory"):
        open_stack(load({"version": 1, "tiers": [{**tier, "capacity": capacity}]}), make_context())


# -- weights -------------------------------------------------------------------------------------------


def safetensors(header, data=bytes(100), claimed=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + data


HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [5, 2], "data_offsets": [0, 40]},
    "b.weight": {"dtype": "F16", "shape": [30], "data_offsets": [40, 100]},
}


def digest(path, content):
    """A digest or None for what cannot be told; nothing else may come of a file."""
    path = path.with_name("model.safetensors")
    path.write_bytes(content)
    try:
        return weights.digest(path, sampled=True)
    except (OSError, ValueError):
        return None


def test_the_seed_is_a_file_of_weights(path):
    assert len(digest(path, safetensors(HEADER))) == 64


@FIXED
@given(content=st.binary(max_size=200) | mutated([safetensors(HEADER)], st.binary(max_size=8), b"".join))
def test_any_bytes_are_weights_or_an_error(path, content):
    digest(path, content)


offsets = st.lists(json_values, max_size=3) | st.lists(st.integers(-10, 200), min_size=2, max_size=2)
tensors = st.fixed_dictionaries({"data_offsets": offsets | json_values}) | json_values


@FIXED
@given(header=st.dictionaries(st.text(max_size=3), tensors, max_size=3) | json_values)
@example(header=[])
@example(header={"a": None})
@example(header={"a": {}})
@example(header={"a": {"data_offsets": [0.5, 1.5]}})
@example(header={"a": {"data_offsets": ["0", "1"]}})
@example(header={"a": {"data_offsets": [1 << 70, 1 << 71]}})
def test_any_header_is_weights_or_an_error(path, header):
    digest(path, safetensors(header))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_no_header_is_too_deep_to_be_refused(path, opening):
    assert digest(path, safetensors(opening * 100_000)) is None


@pytest.mark.parametrize("claimed", [1000, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_header_that_is_longer_than_its_file_is_refused(path, claimed):
    assert digest(path, safetensors(HEADER, claimed=claimed)) is None


@pytest.mark.parametrize(
    "content",
    [safetensors(b"", claimed=1 << 29), safetensors({"a": {"data_offsets": [1, 0]}})],
    ids=["a header of half a gigabyte", "a tensor that ends before it begins"],
)
def test_no_length_makes_it_read_half_a_gigabyte(path, content):
    """A sparse file, in which there would be so much to read."""
    file = path.with_name("model.safetensors")
    file.write_bytes(content)
    with file.open("r+b") as stream:
        stream.truncate(1 << 29 | 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            weights.digest(file, sampled=True)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
        file.unlink()
