"""Real vLLM over disks whose serializers are those of kvtier_lossy."""

from __future__ import annotations

import os

import numpy as np
import pytest
import real_model
import torch
from chunk_files import chunk_files
from real_engines import CHUNK, cpu, cpu_and_disk, hit, prompt
from sizes import some
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier_core.errors import ConfigError
from kvtier_core.types import FRAME_HEADER_NBYTES
from kvtier_lossy.halves import CHANNELS, HEADS, TOKENS, floats, halves_by_payload

ASKED = prompt(170, 530)
HITS = 512
UNMEASURED = {"accept_quality": "unmeasured"}
#: Of each the part that it leaves of a float32 frame, headers included, and the error of a log-probability: at most.
CODECS = [
    ({"serializer": "int8"}, 0.28, 0.1),
    ({"serializer": "fp8"}, 0.28, 0.1),
    ({"serializer": {"type": "kivi", "bits": 4}}, 0.22, 0.6),
    ({"serializer": "cachegen"}, 0.21, 0.2),
]


@pytest.fixture(scope="module")
def computed(model):
    """KV of the first chunk, as transformers computes it: layer, keys or values, head, token, channel."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        cache = loaded.model(torch.tensor([ASKED[:CHUNK]])).past_key_values
    return np.stack([np.stack([layer.keys[0].numpy(), layer.values[0].numpy()]) for layer in cache.layers])


@pytest.fixture(autouse=True)
def without_amx(monkeypatch):
    """With it, vLLM keeps bfloat16 in tiles that no codec knows."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.parametrize("options", [{}, {"block_size": 64}, {"dtype": "bfloat16"}], ids=["float32", "64", "bfloat16"])
def test_keys_and_values_are_where_the_layout_says(engine, tmp_path, computed, options):
    """Each element of the frame that a real engine stored is that of its layer, head, token and channel."""
    with engine(cpu_and_disk(tmp_path), **options) as served:
        served.ask(ASKED[: CHUNK + 1])
        served.settle()
        (group,) = served.connector.side._layout.groups
        layout = served.connector.side._layout
    (file,) = chunk_files(tmp_path)
    payload = memoryview(file.read_bytes())[FRAME_HEADER_NBYTES:][: layout.payload_nbytes]
    assert group.depths == tuple(range(len(computed)))
    halves = halves_by_payload("raw", layout, depths=True)[len(payload)]
    assert len(halves) == 2 * len(computed)
    for half in halves:
        expected = computed[half.depth, 0 if half.is_keys else 1]
        numbers = floats(half.in_payload(payload), half.dtype)
        by_head = numbers.transpose(half.axis(HEADS), 0, half.axis(TOKENS), half.axis(CHANNELS))
        found = by_head.reshape(expected.shape)
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < (0.2 if half.dtype == "bfloat16" else 1e-3), half


@pytest.mark.parametrize(("serializer", "share", "error"), some(CODECS))
def test_a_prompt_is_answered_from_what_a_codec_kept(engine, tmp_path, serializer, share, error):
    """The tiny model's answers are far from each other's if a token of the prompt is another one."""
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1] |= {**serializer, **UNMEASURED}
    with engine(stack, enable_prefix_caching=True) as first:
        first.ask(ASKED)
        (own,) = first.own_hits(ASKED, tokens=1)
        first.settle()
        arena, disk = first.manager.usage()
        assert arena.chunks == disk.chunks == 8
        assert disk.nbytes < share * arena.nbytes
    with engine(stack) as second:
        (loaded,) = second.ask(ASKED, tokens=1)
        assert second.outcomes() == [hit(530, disk=HITS)]
        second.assert_at_rest()
    assert 0 < loaded.differs(own) < error


@pytest.mark.parametrize("serializer", some([serializer for serializer, _, _ in CODECS]))
def test_a_trained_model_says_the_same(engine, tmp_path, serializer):
    made = sorted(real_model.BUILD.glob("smollm2-*"))
    if not made and "KVTIER_CI" not in os.environ:
        pytest.skip("there is no checkpoint: make demo")
    text = (real_model.ROOT / "examples/document.md").read_text()
    asked = AutoTokenizer.from_pretrained(made[-1])(text).input_ids[:530]
    options = {"model": made[-1], "dtype": "bfloat16"}
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1] |= {**serializer, **UNMEASURED}
    with engine(stack, enable_prefix_caching=True, **options) as first:
        first.ask(asked, tokens=8)
        (own,) = first.own_hits(asked, tokens=8)
        first.settle()
    with engine(stack, **options) as second:
        (loaded,) = second.ask(asked, tokens=8)
        assert second.outcomes() == [hit(530, disk=HITS)]
    assert loaded.differs(own) < 0.3


@pytest.mark.more
def test_two_and_four_bits_never_meet_in_a_shared_store(engine, tmp_path):
    def stack(bits):
        made = cpu()
        tier = {"type": "disk", "shared": True, "path": str(tmp_path), "min_free": "0B"}
        made["tiers"].append({**tier, **UNMEASURED, "serializer": {"type": "kivi", "bits": bits}})
        return made

    for bits, found in ((2, 0), (4, 0), (2, HITS), (4, HITS)):
        with engine(stack(bits)) as served:
            assert served.ask(ASKED)[0].cached == found
            served.settle()


def test_an_engine_whose_pages_no_codec_knows_is_told_so(engine, tmp_path, monkeypatch):
    from vllm.v1.attention.backends import cpu_attn

    # Else vLLM refuses it first, on a processor without AVX-512. Nothing is computed here.
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, **__: "vec")
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1] |= {"serializer": "int8", **UNMEASURED}
    with pytest.raises(ConfigError) as caught, engine(stack, kv_cache_dtype="fp8"):
        pass
    assert "int8 cannot encode its KV" in str(caught.value)
