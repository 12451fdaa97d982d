"""The identity of a multimodal item: the tensors that the model receives, never the item's name.

vLLM names an item by a digest, by a counter, or as the client asks, so equal names prove nothing. The processor's
options are not looked at either: whatever they change shows in the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from vllm.multimodal.inputs import BaseMultiModalField, MultiModalFeatureSpec

from kvtier_vllm.requests.fields import ELEMENT, FEATURE, FIELD, PLACE, Unidentified, refuse_others

_Update = Callable[[Any], object]


def content(feature: MultiModalFeatureSpec) -> str:
    """A digest of all that shapes an item's embeddings, as hex. Raises Unidentified."""
    refuse_others("an item", feature, FEATURE)
    refuse_others("the place of an item", feature.mm_position, PLACE)
    if not feature.data or not any(_tensors(element.data) for element in feature.data.values()):
        raise Unidentified("an item of its prompt came without its content")
    digest = blake3(b"kvtier-item-1")
    _put(digest.update, [feature.modality, feature.mm_position.is_embed])
    for name, element in sorted(feature.data.items()):
        refuse_others("an element of an item", element, ELEMENT)
        _put(digest.update, [name, _combined(element.field), element.data])
    return digest.hexdigest()


def _tensors(data: Any) -> bool:
    """Does it contain a tensor? An item in shared memory is only an address: a few numbers."""
    if isinstance(data, list | tuple):
        return any(_tensors(part) for part in data)
    return isinstance(data, torch.Tensor | np.ndarray)


def _combined(field: BaseMultiModalField) -> list[Any]:
    refuse_others("a field of an item", field, FIELD)
    return [type(field).__name__, getattr(field, "dim", None)]


def _put(update: _Update, data: Any) -> None:
    """Feed in each value after its type and size, so that different trees never give the same bytes."""
    if isinstance(data, list | tuple):
        update(f"list {len(data)}\n".encode())
        for part in data:
            _put(update, part)
    elif isinstance(data, np.ndarray) and not data.dtype.hasobject:
        update(f"array {data.dtype.str} {data.shape}\n".encode())
        update(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    elif isinstance(data, torch.Tensor) and data.device.type == "cpu" and data.layout is torch.strided:
        update(f"tensor {data.dtype} {tuple(data.shape)}\n".encode())
        update(data.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif data is None or isinstance(data, bool | int | float | str):
        text = repr(data).encode()
        update(f"{type(data).__name__} {len(text)}\n".encode() + text)
    else:
        raise Unidentified(f"an item of its prompt holds a {type(data).__name__} that kvtier cannot read")
