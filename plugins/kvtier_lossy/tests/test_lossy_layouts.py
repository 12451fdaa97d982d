"""Lossy codecs find keys and values in any order of a page, and refuse layouts that they do not know."""

from __future__ import annotations

import hashlib

import attrs
import numpy as np
import pytest
from lossy_layouts import (
    CHANNELS,
    HEADS,
    ORDERS,
    TOKENS,
    keys_and_values,
    kv_like,
    make_kv_group,
    make_kv_layout,
    numbers,
    payload_of,
)

from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.layouts import ChunkLayout, Elements, KVKind, KVStructure
from kvtier_lossy.config import CachegenConfig, Fp8Config, Int8Config, KiviConfig
from kvtier_testing.laws.serializers import decode, encode, open_serializer

CODECS = [Int8Config(), Fp8Config(), KiviConfig(bits=2), KiviConfig(), KiviConfig(residual=16), CachegenConfig()]
each_codec = pytest.mark.parametrize("config", CODECS, ids=lambda config: f"{config.type}-{CODECS.index(config)}")


def without_residual(config):
    return attrs.evolve(config, residual=0) if config.type == "kivi" else config


def there_and_back(config, payload, layout):
    serializer = open_serializer(config, layout)
    return decode(serializer, encode(serializer, payload, serializer.bound(layout)), len(payload))


@each_codec
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_order_of_a_page_changes_no_number(config, dtype):
    """What becomes of a key depends on its head, token and channel alone."""
    kv = kv_like()
    found = {
        order: keys_and_values(there_and_back(config, payload_of(kv, order, dtype), layout), order, dtype)
        for order in ORDERS
        for layout in [make_kv_layout(order, dtype)]
    }
    first = found.pop("cpu")
    assert 0 < np.abs(first - kv).mean() < 0.5
    assert all(np.array_equal(other, first) for other in found.values())


@each_codec
def test_each_shard_is_encoded_by_itself(config):
    """That of one rank as if there were no other."""
    layouts = [make_kv_layout(), make_kv_layout(ranks=2)]
    one, other = (payload_of(kv_like(seed)) for seed in (0, 1))
    together = there_and_back(config, one + other, layouts[1])
    if config.type != "cachegen":  # of whose layers each has a scale, and all streams one output
        assert together == there_and_back(config, one, layouts[0]) + there_and_back(config, other, layouts[0])
    both = np.concatenate([keys_and_values(one), keys_and_values(other)])
    assert np.abs(keys_and_values(together) - both).mean() < 0.5


@each_codec
@pytest.mark.parametrize("pattern", [0x0000, 0x8000, 0x0001, 0x807F, 0x7FC0, 0x7FA5, 0xFFC5], ids=hex)
def test_zeros_and_what_is_next_to_nothing_or_no_number_become_zeros(config, pattern):
    layout = make_kv_layout()
    payload = np.full(layout.payload_nbytes // 2, pattern, "<u2").tobytes()
    decoded = there_and_back(without_residual(config), payload, layout)
    assert not numbers(decoded).any()


@each_codec
@pytest.mark.parametrize(("pattern", "limit"), [(0x7F80, 2.0**126), (0xFF80, -(2.0**126)), (0x4049, 3.140625)])
def test_a_constant_comes_back_and_infinities_as_the_limit(config, pattern, limit):
    layout = make_kv_layout()
    payload = np.full(layout.payload_nbytes // 2, pattern, "<u2").tobytes()
    decoded = numbers(there_and_back(without_residual(config), payload, layout))
    assert np.abs(decoded / limit - 1).max() <= 2.0**-7


@each_codec
def test_one_nan_spoils_nothing_beside_it(config):
    layout, kv = make_kv_layout(), kv_like()
    kv[1, :, 1, 20, 7] = 0
    expected = there_and_back(config, payload_of(kv), layout)
    kv[1, :, 1, 20, 7] = np.nan
    assert there_and_back(config, payload_of(kv), layout) == expected


#: Of each codec the digests of an encoding and of what it decodes to. Whoever changes one raises `format_version`.
ENCODED = [
    ["87b94f636106fcdd", "480bc57f7e3dbbe8"],
    ["9832bc44d5d09ac8", "374d6ae351e1d83a"],
    ["caaafa539cef9479", "06c54fe84d807caf"],
    ["870dcc796531a2e1", "825c54b226e59350"],
    ["dd33a975344110c8", "6c0b46747a43a455"],
    ["be3736c53aa31a73", "f6875527da799dca"],
]


@each_codec
def test_the_format_is_the_same_everywhere(config):
    layout = make_kv_layout()
    noise = np.frombuffer(hashlib.shake_128(b"kvtier").digest(layout.payload_nbytes), "<u2")
    payload = (noise & 0x83FF | 0x3C00).tobytes()  # from 2 ** -7 to 1.99
    serializer = open_serializer(config, layout)
    encoded = encode(serializer, payload, serializer.bound(layout))
    digests = [hashlib.sha256(each).hexdigest()[:16] for each in (encoded, decode(serializer, encoded, len(payload)))]
    assert digests == ENCODED[CODECS.index(config)]


UNKNOWN = "has pages in which the place of keys and values is unknown"


@each_codec
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"structure": KVStructure.OPAQUE, "elements": ()}, f"(full attention, opaque) {UNKNOWN}"),
        ({"structure": KVStructure.MLA_LATENT, "elements": ()}, f"(full attention, MLA latent) {UNKNOWN}"),
        ({"kind": KVKind.STATE, "elements": ()}, f"(recurrent state, keys and values) {UNKNOWN}"),
        ({"dtype": "uint8"}, "is in uint8, but it encodes only bfloat16, float16, float32"),
        ({"dtype": "bfloat16 float32"}, "is in bfloat16 float32, but it encodes only bfloat16, float16, float32"),
        ({"page_nbytes": [8192, 8192, 8256]}, "has pages that are more than keys and values"),
        ({"elements": [Elements(*ORDERS["nhc"][0])] * 2}, "has pages that are more than keys and values"),
    ],
)
def test_a_layout_that_no_codec_knows_is_refused(config, change, why):
    with pytest.raises(ConfigError) as caught:
        open_serializer(config, ChunkLayout([attrs.evolve(make_kv_group(), **change)], 4 * TOKENS))
    assert f"{config.type} cannot encode its KV: group 0 {why}" in str(caught.value)
    assert "`serializer: packed`" in str(caught.value)


def test_a_model_whose_layers_have_no_known_order_has_no_thirds():
    with pytest.raises(ConfigError, match="whose depth in the model is unknown"):
        open_serializer(CachegenConfig(), ChunkLayout([make_kv_group(depths=())], 4 * TOKENS))


@pytest.mark.parametrize("config", [Int8Config(group=12), Fp8Config(group=64), KiviConfig(group=64)])
def test_groups_must_divide_the_channels(config):
    with pytest.raises(ConfigError, match=f"{CHANNELS} channels are not a multiple of {config.group}"):
        open_serializer(config, make_kv_layout())


@each_codec
def test_parts_of_one_length_must_be_alike(config):
    """A serializer gets the payload of a part, and is not told of which."""
    window = {"kind": KVKind.SLIDING_WINDOW, "reach": 16 * TOKENS, "name": "group 1"}
    like = [make_kv_group(), make_kv_group(**window)]
    payload = payload_of(kv_like())
    assert there_and_back(config, payload, ChunkLayout(like, 4 * TOKENS)) != payload
    other = [make_kv_group(), make_kv_group("nhc", **window)]
    with pytest.raises(ConfigError, match="the parts of a chunk have the same length, but are not alike"):
        open_serializer(config, ChunkLayout(other, 4 * TOKENS))


@each_codec
def test_a_harmed_encoding_is_refused_or_decodes_to_numbers(config):
    """Each byte of what was encoded, and each length; a flipped bit of a stream does not end where it should."""
    layout = make_kv_layout(blocks=1, layers=1)
    serializer = open_serializer(config, layout)
    encoded = encode(serializer, payload_of(kv_like(layers=1, tokens=TOKENS)), serializer.bound(layout))
    for nbytes in range(len(encoded)):
        with pytest.raises(BackendError):
            decode(serializer, encoded[:nbytes], layout.payload_nbytes)
    with pytest.raises(BackendError):
        decode(serializer, encoded + b"\0\0", layout.payload_nbytes)
    with pytest.raises(BackendError):
        decode(serializer, encoded, layout.payload_nbytes - 2)
    refused = 0
    for place in range(len(encoded)):
        harmed = bytearray(encoded)
        harmed[place] ^= 0x40
        try:
            assert len(decode(serializer, bytes(harmed), layout.payload_nbytes)) == layout.payload_nbytes
        except BackendError:
            refused += 1
    assert refused >= (16 if config.type != "cachegen" else HEADS * TOKENS)
