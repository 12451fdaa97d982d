"""The parts of a chunk's KV, and the places of its bytes in frames."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.packed_form import packed_nbytes
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey

#: The bytes of a key that are the mark of its tenant, if it has one. The others alone are unique.
_TENANT = slice(KEY_NBYTES - 9, KEY_NBYTES - 1)
#: More ranks than any engine has.
MOST_RANKS = 1 << 14


class KVKind(enum.StrEnum):
    """The part of a prefix that a group of layers needs to continue after it."""

    FULL_ATTENTION = "full attention"  #: the KV of every token of the prefix
    SLIDING_WINDOW = "sliding window"  #: the KV of the last ``reach - 1`` tokens
    CHUNKED_LOCAL = "chunked local attention"  #: the KV of the tokens since the last multiple of ``reach``
    STATE = "recurrent state"  #: the state after the last token: Mamba, GDN and other linear attention


class KVStructure(enum.StrEnum):
    """The type of a page's elements, if the engine side knows it, for serializers."""

    KEYS_AND_VALUES = "keys and values"  #: one number per element; their order is the engine's, a fact of the namespace
    MLA_LATENT = "MLA latent"  #: one number per element: the compressed KV of multi-head latent attention
    OPAQUE = "opaque"  #: anything else, such as quantized KV with its scales: bytes to keep as they are


@attrs.frozen
class Elements:
    """The keys or the values in a page, as a strided array. All numbers count elements."""

    heads: int
    tokens: int
    channels: int
    first: int  #: offset of the first channel of the first token and head
    of_head: int  #: stride from one head to the next
    of_token: int
    of_channel: int


def _elements(rows: Iterable[Elements | Mapping[str, int]]) -> tuple[Elements, ...]:
    """Convert rows, including those of `attrs.asdict`."""
    return tuple(row if isinstance(row, Elements) else Elements(**row) for row in rows)


@attrs.frozen
class KVGroup:
    """Layers that share a block table: the engine keeps a request's block ``b`` in page ``b`` of each of them.

    Raises ValueError for empty pages, blocks or windows.
    """

    name: str  #: for logs, errors and facts; unique in the layout
    kind: KVKind = attrs.field(converter=KVKind)
    #: Bytes of a page of each layer, as one rank holds it.
    page_nbytes: tuple[int, ...] = attrs.field(converter=tuple[int, ...])
    block_tokens: int  #: tokens of one block; for states, the tokens between two states that the engine may keep
    dtype: str  #: of the elements of a page, as torch names it: ``bfloat16``; separated by spaces if layers differ
    structure: KVStructure = attrs.field(converter=KVStructure)
    reach: int = 0  #: tokens of a window, or of a chunk of local attention; 0 for the other kinds
    #: The positions of keys and values in a page of every layer, for serializers; empty if unknown or if layers
    #: differ. Not part of the `fact`: the page layout and the attention backend are separate facts.
    elements: tuple[Elements, ...] = attrs.field(default=(), converter=_elements)
    #: Each layer's position in the model, for serializers; empty if unknown.
    depths: tuple[int, ...] = attrs.field(default=(), converter=tuple[int, ...])

    def __attrs_post_init__(self) -> None:
        shortest = 1 if self.kind in (KVKind.SLIDING_WINDOW, KVKind.CHUNKED_LOCAL) else 0
        if self.block_tokens < 1 or self.reach < shortest or not all(nbytes > 0 for nbytes in self.page_nbytes):
            raise ValueError(f"{self.name}: pages, blocks and windows must not be empty")

    @property
    def fact(self) -> str:
        """The group in plain words, as a fact of a namespace."""
        pages = " ".join(map(str, self.page_nbytes))
        tokens = f"{self.block_tokens} tokens a block"
        return f"{self.name}: {self.needs}, {tokens}, {self.dtype}, {self.structure}, pages of {pages} bytes"

    @property
    def needs(self) -> str:
        """The KV that it needs to continue, in plain words."""
        return f"{self.kind} of {self.reach}" if self.reach else str(self.kind)

    def needed(self, tokens: int) -> range:
        """The blocks that a request needs to continue after its first ``tokens``, a multiple of a block."""
        end = tokens // self.block_tokens
        return range(max(0, end - self._depth(tokens)), end)

    def stored(self, tokens: int) -> int:
        """How many of the last blocks of a chunk of ``tokens`` are worth storing: those that are ever needed."""
        return min(tokens // self.block_tokens, self._depth(tokens))

    def _depth(self, tokens: int) -> int:
        """The number of blocks before ``tokens`` that are needed there, if that many exist."""
        match self.kind:
            case KVKind.FULL_ATTENTION:
                return tokens // self.block_tokens
            case KVKind.SLIDING_WINDOW:
                return -(-(self.reach - 1) // self.block_tokens)
            case KVKind.CHUNKED_LOCAL:
                return -(-(tokens % self.reach) // self.block_tokens)
            case KVKind.STATE:
                return 1


class LayerPlace(NamedTuple):
    """The place of the pages of one layer in a shard."""

    layer: int  #: its number among the layers of the rank, group after group
    group: int  #: number of its group in the layout
    page_nbytes: int
    offset: int  #: bytes before the layer's first page; the others follow it contiguously
    blocks: int  #: pages of this layer in the frame


@attrs.frozen
class Shard:
    """The share of a frame that belongs to one rank, or to several ranks with the same bytes.

    A shard consists of groups, a group of layers, and a layer of pages in token order: the last ones of the chunk, if
    not all are stored. A packed shard is the encoded form of these bytes (csrc/packed.h).
    """

    offset: int  #: bytes from the start of the frame
    layers: tuple[LayerPlace, ...]  #: in its order
    packed: bool = False

    @cached_property
    def pages_nbytes(self) -> int:
        """Bytes of all its pages in the engine."""
        return sum(layer.page_nbytes * layer.blocks for layer in self.layers)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in the frame."""
        return packed_nbytes(self.pages_nbytes) if self.packed else self.pages_nbytes


def frame_nbytes(payload_nbytes: int) -> int:
    """Bytes of a frame with a payload of this length."""
    return FRAME_HEADER_NBYTES + -(-payload_nbytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


@attrs.frozen
class Part:
    """The layout of one frame of a chunk.

    A frame is a header, then the shards of the ranks, then zeros up to a multiple of `FRAME_ALIGNMENT`.
    """

    number: int  #: in the chunk layout
    groups: tuple[int, ...]  #: numbers of the groups in this frame
    blocks: tuple[int, ...]  #: for each group of the chunk layout, the pages per layer; 0 if it is in another frame
    shards: tuple[Shard, ...]  #: in the order of the frame
    replicas: int  #: consecutive ranks that have the same shard

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    @cached_property
    def frame_nbytes(self) -> int:
        """Bytes of the whole frame."""
        return frame_nbytes(self.payload_nbytes)

    def shard_of(self, rank: int) -> Shard:
        """This rank's share of the frame."""
        return self.shards[rank // self.replicas]


@attrs.frozen
class ChunkLayout:
    """The frames of a chunk, and the places of its bytes in them.

    The groups that need the KV of every token share one frame, which every stored chunk has. Each other group has its
    own frame, which only chunks at boundaries have: a boundary is the end of a chunk after which a request can
    continue. These frames are the *parts* of a chunk. Every chunk has part 0; if no group needs every token, it is that
    of the first group.

    The groups are facts of the namespace, and the namespace is part of every key, so no key names a chunk of other
    groups.
    """

    groups: tuple[KVGroup, ...] = attrs.field(converter=tuple[KVGroup, ...])  #: with the layers of all pipeline stages
    tokens: int  #: of a chunk: a multiple of every group's ``block_tokens``, else ValueError
    ranks: int = 1  #: of all stages, stage after stage
    replicas: int = 1  #: number of consecutive ranks of a stage with the same bytes; the first one stores them
    #: For each pipeline stage, the number of layers of each group; empty if there is one stage. ValueError unless these
    #: add up to all layers, and ``ranks`` is a multiple of stages times replicas.
    stages: tuple[tuple[int, ...], ...] = ()
    packed: bool = False  #: are the shards of frames packed?
    #: May frames of its namespace have the shards of another number of ranks? Each head is then in one shard, or the
    #: only shard is independent of the ranks. ValueError with stages, or groups that do not keep every token.
    any_ranks: bool = False

    def __attrs_post_init__(self) -> None:
        for group in self.groups:
            if self.tokens < 1 or self.tokens % group.block_tokens:
                raise ValueError(
                    f"{self.tokens} tokens are not a multiple of the block size {group.block_tokens} ({group.name})"
                )
            if group.kind is KVKind.CHUNKED_LOCAL and group.reach % self.tokens:
                raise ValueError(f"{group.reach} tokens of local attention are not whole chunks ({group.name})")
        layers = tuple(len(group.page_nbytes) for group in self.groups)
        if self.stages and tuple(map(sum, zip(*self.stages, strict=True))) != layers:
            raise ValueError(f"stages have {self.stages} layers, but groups have {layers}")
        if not any(group.stored(self.tokens) for group in self.groups):
            raise ValueError("no group has anything to store")
        if self.replicas < 1 or not 0 < self.ranks <= MOST_RANKS:
            raise ValueError(f"expected 1 to {MOST_RANKS} ranks, got {self.ranks} with {self.replicas} replicas")
        if self.ranks % (max(1, len(self.stages)) * self.replicas):
            raise ValueError(f"{self.ranks} ranks for {max(1, len(self.stages))} stages of {self.replicas} replicas")
        if self.any_ranks and (self.stages or not self.keeps_every_token):
            raise ValueError("frames of any ranks need all layers and all tokens in each shard")

    @property
    def keeps_every_token(self) -> bool:
        """Does the engine keep the KV of all tokens of a request, in every group?"""
        return all(group.kind is KVKind.FULL_ATTENTION for group in self.groups)

    @property
    def shards(self) -> int:
        """Number of shards of each frame."""
        return self.ranks // self.replicas

    def stores(self, rank: int) -> bool:
        """Does this rank store its shard? Otherwise another rank with the same bytes does."""
        return rank % self.replicas == 0

    def pages_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Bytes of a page of each layer of a rank, by group."""
        return tuple(group.page_nbytes[layers] for group, layers in self._layers_of(rank))

    def depths_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The position in the model of each layer of a rank, by group; empty for groups where it is unknown."""
        return tuple(group.depths[layers] for group, layers in self._layers_of(rank))

    def _layers_of(self, rank: int) -> Iterator[tuple[KVGroup, slice]]:
        """Each group, and those of its layers that a rank has."""
        stages = self.stages or [[len(group.page_nbytes) for group in self.groups]]
        stage = rank * len(stages) // self.ranks
        ends = map(sum, zip(*stages[: stage + 1], strict=True))
        for group, end, count in zip(self.groups, ends, stages[stage], strict=True):
            yield group, slice(end - count, end)

    def alone(self, rank: int) -> ChunkLayout:
        """The layout of one rank's shard, as if it were the only rank."""
        groups = [
            attrs.evolve(group, page_nbytes=group.page_nbytes[layers], depths=group.depths[layers])
            for group, layers in self._layers_of(rank)
        ]
        return ChunkLayout(groups, self.tokens, packed=self.packed)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The layout of each of its frames."""
        stored = [number for number, group in enumerate(self.groups) if group.stored(self.tokens)]
        every = [number for number in stored if self.groups[number].kind is KVKind.FULL_ATTENTION]
        sets = [every] if every else []
        sets += [[number] for number in stored if number not in every]
        return tuple(self._part(number, groups) for number, groups in enumerate(sets))

    @property
    def self_test_slots(self) -> int:
        """Number of arena slots in which ranks test their copies at start, all at the same time.

        One for each part and replica: a rank's shard has another offset in each part.
        """
        return len(self.parts) * self.replicas

    def _part(self, number: int, groups: Sequence[int]) -> Part:
        blocks = tuple(group.stored(self.tokens) * (place in groups) for place, group in enumerate(self.groups))
        shards, offset = [], FRAME_HEADER_NBYTES
        for rank in range(0, self.ranks, self.replicas):
            shards.append(Shard(offset, self._places(rank, groups), self.packed))
            offset += shards[-1].nbytes
        return Part(number, tuple(groups), blocks, tuple(shards), self.replicas)

    def _places(self, rank: int, groups: Sequence[int]) -> tuple[LayerPlace, ...]:
        pages = self.pages_of(rank)
        firsts = list(accumulate(map(len, pages), initial=0))
        layers, offset = [], 0
        for place in groups:
            blocks = self.groups[place].stored(self.tokens)
            for layer, nbytes in enumerate(pages[place], firsts[place]):
                layers.append(LayerPlace(layer, place, nbytes, offset, blocks))
                offset += nbytes * blocks
        return tuple(layers)

    def stored_blocks(self, group: int, chunk: int) -> range:
        """The blocks of a group whose pages are in a chunk's frame, as indices of a block table."""
        blocks = self.tokens // self.groups[group].block_tokens
        return range((chunk + 1) * blocks - self.groups[group].stored(self.tokens), (chunk + 1) * blocks)

    def needed(self, part: Part, chunks: int) -> range:
        """The chunks whose part is needed to continue after the first ``chunks`` chunks of a prompt."""
        group = self.groups[part.groups[0]]
        blocks = group.needed(chunks * self.tokens)
        return range(blocks.start * group.block_tokens // self.tokens if blocks else chunks, chunks)

    def check_path(self, path: Sequence[ChunkKey], parts: Sequence[ChunkKey] = ()) -> None:
        """Raise ContractError unless a path names different chunks, and ``parts`` different other parts of chunks."""
        keys = {*path, *parts}
        if len(keys) < len(path) + len(parts):
            raise ContractError("a path names a chunk twice")
        if not set(map(len, keys)) <= {KEY_NBYTES}:
            raise ContractError(f"expected keys of {KEY_NBYTES} bytes")
        others = range(1, len(self.parts))
        if (others and any(map(number_of_part, path))) or not all(number_of_part(key) in others for key in parts):
            raise ContractError("a key does not name a chunk of this layout, or a part of one")

    def part_of(self, key: ChunkKey) -> Part:
        """The part that a key names."""
        return self.parts[number_of_part(key)] if len(self.parts) > 1 else self.parts[0]

    def payloads_nbytes(self, keys: Sequence[ChunkKey]) -> int:
        """Total bytes of the payloads with these keys."""
        if len(self.parts) == 1:
            return len(keys) * self.payload_nbytes
        return sum(self.part_of(key).payload_nbytes for key in keys)

    def keys(self, digests: Iterable[ChunkKey], tenant: bytes) -> list[ChunkKey]:
        """The keys of a tenant's chunks to which a token database gave these ``digests``; see `marked`."""
        keys = marked(digests, tenant)
        return list(map(chunk_key, keys)) if len(self.parts) > 1 else keys

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of the longest payload."""
        return max(part.payload_nbytes for part in self.parts)

    @cached_property
    def frame_nbytes(self) -> int:
        """Bytes of the longest frame, and of a slot, which holds any of them."""
        return max(part.frame_nbytes for part in self.parts)


def tenant_mark(cache_salt: str) -> bytes:
    """What the keys of a tenant have in common, by which its frames are found in any store; empty without a salt."""
    salt, nbytes = cache_salt.encode("utf-8", "surrogatepass"), _TENANT.stop - _TENANT.start
    return hashlib.blake2b(salt, digest_size=nbytes, person=b"kvtier-tenant").digest() if salt else b""


def marked(digests: Iterable[ChunkKey], mark: bytes) -> list[ChunkKey]:
    """The digests with this mark in place of 8 of their 32 bytes; as they are if it is empty."""
    return [ChunkKey(each[: _TENANT.start] + mark + each[_TENANT.stop :]) if mark else each for each in digests]


def is_marked(key: ChunkKey, mark: bytes) -> bool:
    """Does the key have this mark?"""
    return key[_TENANT] == mark


def part_key(chunk: ChunkKey, number: int) -> ChunkKey:
    """The key of a part, for chunks of several parts. Part 0 has the chunk's own key, see `chunk_key`."""
    return ChunkKey(chunk[: KEY_NBYTES - 1] + bytes([number]))


def chunk_key(key: ChunkKey) -> ChunkKey:
    """The key of the chunk for a digest or the key of a part, for chunks of several parts."""
    return part_key(key, 0)


def number_of_part(key: ChunkKey) -> int:
    """The number of the part that a key names, for chunks of several parts."""
    return key[KEY_NBYTES - 1]
