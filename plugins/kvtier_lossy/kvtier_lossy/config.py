"""The settings of the lossy serializers."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, le

from kvtier_core.interfaces import OpenContext, Serializer, SerializerConfig


@attrs.frozen
class _ScaledConfig(SerializerConfig):
    lossless: ClassVar[bool] = False
    typical_ratio: ClassVar[float] = 1.99

    group: int = attrs.field(default=8, validator=ge(1))  #: channels that share a scale; it must divide those of a head

    def open(self, ctx: OpenContext) -> Serializer:
        from kvtier_lossy.scaled import Fp8, Int8

        serializer = {"fp8": Fp8, "int8": Int8}[self.type]
        return serializer(self.type, ctx.layout, self.group)


@attrs.frozen
class Int8Config(_ScaledConfig):
    """Half the bytes of 16-bit KV, as integers with scales."""

    type: ClassVar[str] = "int8"


@attrs.frozen
class Fp8Config(_ScaledConfig):
    """Half the bytes of 16-bit KV, as E4M3 numbers with scales."""

    type: ClassVar[str] = "fp8"


@attrs.frozen
class KiviConfig(SerializerConfig):
    """A quarter of the bytes of 16-bit KV or less, as levels between the least and the greatest element of a group."""

    type: ClassVar[str] = "kivi"
    lossless: ClassVar[bool] = False

    bits: Literal[2, 4] = 4  #: of an element
    #: The tokens of keys, and the channels of values, that share a range; it must divide the channels of a head.
    group: int = attrs.field(default=32, validator=ge(4))
    residual: int = attrs.field(default=32, validator=ge(0))  #: tokens at the end of a chunk that are kept as they are

    @property
    def typical_ratio(self) -> float:  # type: ignore[override]  # it depends on the options
        return {2: 4.6, 4: 2.9}[self.bits]

    def open(self, ctx: OpenContext) -> Serializer:
        from kvtier_lossy.kivi import Kivi

        return Kivi(self.type, ctx.layout, self.group, self.bits, self.residual)


@attrs.frozen
class CachegenConfig(SerializerConfig):
    """A few bits per element: differences to an anchor token, quantized by layer and coded by their frequencies."""

    type: ClassVar[str] = "cachegen"
    lossless: ClassVar[bool] = False
    typical_ratio: ClassVar[float] = 3.0

    anchors: int = attrs.field(default=10, validator=ge(2))  #: every ``anchors``-th token is an anchor
    #: Levels of a difference on either side of zero in the first third of the layers; two thirds of them in the second
    #: third, half of them in the last.
    levels: int = attrs.field(default=24, validator=[ge(4), le(120)])

    def open(self, ctx: OpenContext) -> Serializer:
        from kvtier_lossy.cachegen import Cachegen
        from kvtier_lossy.halves import halves_by_payload

        return Cachegen(self.type, halves_by_payload(self.type, ctx.layout, depths=True), self.anchors, self.levels)
