"""Every lossy codec keeps the laws of a serializer, and comes as close as its module says."""

from __future__ import annotations

import numpy as np
import pytest
from lossy_layouts import CHANNELS, HEADS, keys_and_values, kv_like, make_kv_layout, numbers, payload_of

from kvtier_lossy.config import CachegenConfig, Fp8Config, Int8Config, KiviConfig
from kvtier_testing import SerializerLaws
from kvtier_testing.laws.serializers import encode, open_serializer

#: Of a number, what its rounding to bfloat16 takes or adds, and float32 before that.
ROUNDED = 2.0**-8
#: Where a scale would be less than 2 ** -100 everything becomes zero: at most 448 times as much.
LEAST = 2.0**-91


class LossyLaws(SerializerLaws):
    """In the order of vLLM on a CPU."""

    layout = make_kv_layout()

    def payloads(self):
        """But for those of NaN alone: they are stored as zeros, so that zeros are close."""
        yield from (payload for payload in super().payloads() if not any(payload) or numbers(payload).any())
        yield payload_of(kv_like())

    def is_close(self, payload, decoded):
        exact, found = keys_and_values(payload), keys_and_values(decoded)
        return bool((np.abs(found - exact) <= self.bound_of(exact) * 1.001 + LEAST).all())

    def bound_of(self, exact):
        raise NotImplementedError


def scales(exact, group, greatest):
    """Of each element, by the definition: over all tokens, for a head and a group of channels."""
    of_group = np.abs(exact).max(3, keepdims=True).reshape(*exact.shape[:3], 1, CHANNELS // group, group).max(-1)
    return np.repeat(of_group, group, axis=-1) / greatest


class TestInt8(LossyLaws):
    def config(self, folder):
        return Int8Config()

    def others(self, folder):
        return [Int8Config(group=32)]

    def bound_of(self, exact):
        return scales(exact, 8, 127) / 2 + ROUNDED * np.abs(exact)


class TestFp8(LossyLaws):
    def config(self, folder):
        return Fp8Config()

    def others(self, folder):
        return [Fp8Config(group=32)]

    def bound_of(self, exact):
        return np.maximum(np.abs(exact) / 16, scales(exact, 8, 448) / 2**10) + ROUNDED * np.abs(exact)


@pytest.mark.more
class TestKivi(LossyLaws):
    bits = 4

    def config(self, folder):
        return KiviConfig(bits=self.bits)

    def others(self, folder):
        return [KiviConfig(bits=6 - self.bits), KiviConfig(bits=self.bits, group=16), KiviConfig(residual=16)]

    def bound_of(self, exact):
        """Groups are pages of 16 tokens, and 32 channels."""
        bound = np.empty_like(exact)
        for half, (axis, shape) in enumerate([(-2, (HEADS, 4, 16, CHANNELS)), (-1, (HEADS, 64, 1, CHANNELS))]):
            grouped = exact[:, half].reshape(-1, *shape)
            least, greatest = grouped.min(axis, keepdims=True), grouped.max(axis, keepdims=True)
            step = (greatest - least) / (2**self.bits - 1)
            of_half = step / 2 + ROUNDED * np.maximum(np.abs(least), np.abs(greatest))
            bound[:, half] = np.broadcast_to(of_half, grouped.shape).reshape(exact[:, half].shape)
        return bound


@pytest.mark.more
class TestKiviOfTwoBits(TestKivi):
    bits = 2


@pytest.mark.more
class TestCachegen(LossyLaws):
    levels = (24, 16, 12)  #: of the three layers

    def config(self, folder):
        return CachegenConfig()

    def others(self, folder):
        return [CachegenConfig(anchors=16), CachegenConfig(levels=40)]

    def bound_of(self, exact):
        """Differences are those to an anchor that is itself off by half of its scale at most."""
        anchors, rounded_up = exact[..., ::10, :], 1 + 2.0**-7
        half_of_anchors = np.abs(anchors).max(-2, keepdims=True) / 127 / 2 * rounded_up
        differences = np.abs(exact - np.repeat(anchors, 10, axis=-2)[..., : exact.shape[-2], :])
        levels = np.array(self.levels).reshape(3, 1, 1, 1, 1)
        of_differences = (differences.max(-2, keepdims=True) + half_of_anchors) / levels / 2 * rounded_up
        bound = np.broadcast_to(of_differences, exact.shape).copy()
        bound[..., ::10, :] = half_of_anchors
        return bound + ROUNDED * (np.abs(exact) + bound)


@pytest.mark.parametrize(
    "config", [Int8Config(), Fp8Config(), KiviConfig(residual=0), KiviConfig(bits=2, residual=0), CachegenConfig()]
)
def test_a_simulation_reckons_with_about_what_comes_out(config):
    payload = payload_of(kv_like())
    serializer = open_serializer(config, make_kv_layout())
    ratio = len(payload) / len(encode(serializer, payload, serializer.bound(make_kv_layout())))
    assert ratio == pytest.approx(config.typical_ratio, rel=0.3)
