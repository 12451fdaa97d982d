"""What the KV of a token is: a function of all tokens up to it, of layer and rank, and of the place in the page.

The forward is made of torch's operators alone, so that the same one runs on the CPU, and in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

_MASK = (1 << 64) - 1
#: Odd numbers of 64 bits, as signed ones: torch multiplies them modulo 2^64.
_PLACE, _MIX = -7046029254386353131, -4658895280553007687
#: Of four numbers in bfloat16: the bits that vary (signs, mantissas, the last of the exponents), and those that do not.
_VARIES, _EXPONENT = -0x7F007F007F007F01, 0x3F003F003F003F00


@attrs.frozen
class Forward:
    """What one step reads and writes, token by token, in places of the cache: ``block * block_tokens + offset``."""

    reads: Sequence[int] = ()
    read_histories: Sequence[int] = ()
    writes: Sequence[int] = ()
    write_histories: Sequence[int] = ()


def histories(tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """For each token a digest of 64 bits of all tokens up to it. ``known``: those of the first tokens."""
    found = list(known)
    digest = found[-1] if found else 0x9E3779B97F4A7C15
    for token in tokens[len(found) :]:
        digest = ((digest ^ (digest >> 31) ^ token) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        found.append(digest)
    return found


def as_signed(digests: Sequence[int], rank: int) -> list[int]:
    """The same numbers as torch's int64, others for each rank."""
    return [((digest ^ (rank * 0xD6E8FEB86659FD93 & _MASK)) ^ (1 << 63)) - (1 << 63) for digest in digests]


def kv(digests: torch.Tensor, layer: int, words: int) -> torch.Tensor:
    """The words of these tokens in a layer, a row each: numbers in bfloat16 that pack."""
    place = torch.arange(1, words + 1, device=digests.device) + (layer << 32)
    mixed = digests[:, None] + place[None] * _PLACE
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return (mixed ^ (mixed >> 32)) & _VARIES | _EXPONENT


def forward(
    caches: Sequence[torch.Tensor],
    block_tokens: int,
    wrong: torch.Tensor,
    reads: torch.Tensor,
    read_histories: torch.Tensor,
    writes: torch.Tensor,
    write_histories: torch.Tensor,
) -> None:
    """Add to ``wrong`` the tokens in which some layer is not what it must be; then write the KV of new tokens.

    A cache has a row of int64 for each block. Places in block 0 are padding: they are not compared.
    """
    matter = reads >= block_tokens
    for layer, cache in enumerate(caches):
        rows = cache.unflatten(1, (block_tokens, -1))
        read = rows[reads // block_tokens, reads % block_tokens]
        differs = (read != kv(read_histories, layer, rows.shape[2])).any(1)
        wrong += (differs & matter).sum()
    for layer, cache in enumerate(caches):
        rows = cache.unflatten(1, (block_tokens, -1))
        rows[writes // block_tokens, writes % block_tokens] = kv(write_histories, layer, rows.shape[2])
