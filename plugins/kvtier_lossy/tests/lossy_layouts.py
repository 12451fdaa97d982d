"""Layouts whose pages have keys and values in known places, and payloads of them as plain arrays."""

from __future__ import annotations

import numpy as np

from kvtier_core.layouts import ChunkLayout, Elements, KVGroup, KVKind, KVStructure

HEADS, TOKENS, CHANNELS = 2, 16, 32
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Of each engine's order the places of keys and values in a page: heads, tokens and channels, the first, and the steps.
ORDERS = {
    # vLLM on a CPU: of each head all keys, channel after channel, then all values, token after token
    "cpu": [
        (HEADS, TOKENS, CHANNELS, 0, 2 * TOKENS * CHANNELS, 1, TOKENS),
        (HEADS, TOKENS, CHANNELS, TOKENS * CHANNELS, 2 * TOKENS * CHANNELS, CHANNELS, 1),
    ],
    # vLLM on a GPU: of each head of each token, or each token of each head, the key and the value
    "nhc": [
        (HEADS, TOKENS, CHANNELS, first, 2 * CHANNELS, 2 * CHANNELS * HEADS, 1) for first in (0, CHANNELS)
    ],
    "hnc": [
        (HEADS, TOKENS, CHANNELS, first, 2 * CHANNELS * TOKENS, 2 * CHANNELS, 1) for first in (0, CHANNELS)
    ],
}  # fmt: skip


def make_kv_group(order="cpu", dtype="bfloat16", layers=3, **options):
    nbytes = 2 * HEADS * TOKENS * CHANNELS * ITEMSIZE[dtype]
    described = {
        "name": "group 0",
        "kind": KVKind.FULL_ATTENTION,
        "page_nbytes": [nbytes] * layers,
        "block_tokens": TOKENS,
        "dtype": dtype,
        "structure": KVStructure.KEYS_AND_VALUES,
        "elements": [Elements(*each) for each in ORDERS[order]],
        "depths": range(layers),
    }
    return KVGroup(**described | options)


def make_kv_layout(order="cpu", dtype="bfloat16", blocks=4, layers=3, ranks=1):
    return ChunkLayout([make_kv_group(order, dtype, layers)], blocks * TOKENS, ranks)


def numbers(payload, dtype="bfloat16"):
    """The elements of a payload as float64, without NaN and infinities."""
    if dtype == "bfloat16":
        found = (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.frombuffer(payload, "<f2" if dtype == "float16" else "<f4").astype(np.float32)
    limit = 65504.0 if dtype == "float16" else 2.0**126
    return np.clip(np.nan_to_num(found, posinf=limit, neginf=-limit), -limit, limit).astype(np.float64)


def keys_and_values(payload, order="cpu", dtype="bfloat16", blocks=4):
    """The numbers of a payload of one rank: layer, keys or values, head, token, channel."""
    flat = numbers(payload, dtype).reshape(-1, blocks, 2 * HEADS * TOKENS * CHANNELS)
    halves = []
    for heads, tokens, channels, first, of_head, of_token, of_channel in ORDERS[order]:
        head, token, channel = np.ogrid[:heads, :tokens, :channels]
        found = flat[:, :, first + head * of_head + token * of_token + channel * of_channel]
        halves.append(found.swapaxes(1, 2).reshape(len(flat), heads, blocks * tokens, channels))
    return np.stack(halves, axis=1)


def payload_of(kv, order="cpu", dtype="bfloat16"):
    """The payload with these keys and values: layer, keys or values, head, token, channel."""
    layers, _, heads, tokens, channels = kv.shape
    pages = np.empty((layers, tokens // TOKENS, 2 * heads * TOKENS * channels), np.float32)
    for half, (_, _, _, first, of_head, of_token, of_channel) in enumerate(ORDERS[order]):
        head, token, channel = np.ogrid[:heads, :TOKENS, :channels]
        content = kv[:, half].reshape(layers, heads, -1, TOKENS, channels).swapaxes(1, 2)
        pages[:, :, first + head * of_head + token * of_token + channel * of_channel] = content
    if dtype == "bfloat16":
        return (pages.view(np.uint32) >> 16).astype("<u2").tobytes()
    return pages.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def kv_like(seed=0, layers=3, tokens=64):
    """Numbers as in KV: channels of keys differ by their size and their mean, tokens of values by their size."""
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal((layers, 2, HEADS, tokens, CHANNELS))
    kv[:, 0] *= np.exp(rng.standard_normal((layers, HEADS, 1, CHANNELS)))
    kv[:, 0] += 3 * rng.standard_normal((layers, HEADS, 1, CHANNELS))
    kv[:, 1] *= np.exp(rng.standard_normal((layers, HEADS, tokens, 1)))
    return kv.astype(np.float32)
