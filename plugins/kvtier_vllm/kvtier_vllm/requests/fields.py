"""The meaning of each field of a request for its KV.

Another version of vLLM may have fields that are not in these tables. `refuse_others` finds those that are set, and the
request is bypassed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import attrs
import msgspec


class Unidentified(Exception):
    """Something that the KV of a request depends on cannot be identified; the message says what."""


@attrs.frozen
class Covered:
    """The field is part of the identity."""

    by: str  #: the part of the key that covers it


@attrs.frozen
class Harmless:
    """The field is not part of the identity."""

    why: str  #: the KV of a prompt does not depend on it


@attrs.frozen
class Refused:
    """A request in which the field is set is bypassed."""

    why: str  #: the reason of the bypass, when it is set


Meaning = Covered | Harmless | Refused

_A_NAME = Harmless("names a request")
_ORDER = Harmless("says when and where it runs")
_OUTPUT = Harmless("the pooler reads it, after the forward")

#: Fields of vLLM's EngineCoreRequest, from which the scheduler's Request takes what the workers need.
REQUEST: Mapping[str, Meaning] = {
    "prompt_token_ids": Covered("the tokens"),
    "mm_features": Covered("the items, see FEATURE"),
    "lora_request": Covered("the adapter, see ADAPTER"),
    "cache_salt": Covered("the salt"),
    "pooling_params": Covered("nothing that is harmless, see POOLING"),
    "prompt_embeds": Refused("its prompt is given as embeddings"),
    "prompt_is_token_ids": Refused("its prompt is given as embeddings"),
    "resumable": Refused("it is a session: its prompt is extended later"),
    "sampling_params": Harmless("workers hand them to the sampler, after the forward"),
    "request_id": _A_NAME,
    "external_req_id": _A_NAME,
    "session_id": _A_NAME,
    "trace_headers": _A_NAME,
    "arrival_time": _ORDER,
    "priority": _ORDER,
    "client_index": _ORDER,
    "current_wave": _ORDER,
    "data_parallel_rank": _ORDER,
    "abort_immediately": Harmless("it computes nothing"),
    "reasoning_ended": Harmless("for the grammar of the answer"),
    "reasoning_parser_kwargs": Harmless("for the grammar of the answer"),
    "kv_hints": Harmless("says what to keep, not what it is"),
}

#: Fields of the parameters of a pooling request.
POOLING: Mapping[str, Meaning] = {
    "extra_kwargs": Refused("it has pooling parameters that the model may read (extra_kwargs)"),
    "skip_reading_prefix_cache": Harmless("nothing is looked up then"),
    "task": _OUTPUT,
    "use_activation": _OUTPUT,
    "dimensions": _OUTPUT,
    "step_tag_id": _OUTPUT,
    "returned_token_ids": _OUTPUT,
    "requires_token_ids": _OUTPUT,
    "late_interaction_params": _OUTPUT,
    "output_kind": _OUTPUT,
}

#: Fields of a LoRARequest.
ADAPTER: Mapping[str, Meaning] = {
    "lora_path": Covered("the content of its files"),
    "is_3d_lora_weight": Covered("the adapter"),
    "load_inplace": Refused("it is reloaded under its old id"),
    "lora_name": Harmless("a name; see `names` for what the engine keeps under it"),
    "lora_int_id": Harmless("vLLM's number for the weights; see `adapters` for what is behind it"),
    "base_model_name": Harmless("the server lists it, nothing reads it"),
}

#: Fields of a multimodal item.
FEATURE: Mapping[str, Meaning] = {
    "data": Covered("the item's content"),
    "modality": Covered("the item's content"),
    "mm_position": Covered("where the item lies, see PLACE"),
    "identifier": Harmless("a name; see `names` for what the engine keeps under it"),
    "mm_hash": Harmless("a name, of what the processor cached"),
}

#: Fields of the place of an item in its prompt.
PLACE: Mapping[str, Meaning] = {
    "offset": Covered("where the item lies"),
    "length": Covered("where the item lies"),
    "is_embed": Covered("the item's content"),
}

#: Fields of one of an item's tensors, as the model will receive it.
ELEMENT: Mapping[str, Meaning] = {
    "data": Covered("the item's content"),
    "field": Covered("the item's content, see FIELD"),
}

#: Fields that define how a tensor is combined with those of other items.
FIELD: Mapping[str, Meaning] = {
    "dim": Covered("the item's content"),
    "slices": Harmless("how the processor took the items apart"),
    "batch_size": Harmless("how many items the processor made at once"),
    "keep_on_cpu": Harmless("where the same bytes lie"),
}


def refuse_others(what: str, thing: object, table: Mapping[str, Meaning], of: type | None = None) -> None:
    """Raise Unidentified if ``thing``, described as ``what``, has a field set that the table refuses or does not have.

    ``of`` is the class that declares the fields, if it is not that of ``thing``.
    """
    for name, default in fields(of or type(thing)):
        meaning = table.get(name)
        if isinstance(meaning, Covered | Harmless) or _is(getattr(thing, name, default), default):
            continue
        raise Unidentified(meaning.why if meaning else f"vLLM's field {name!r} of {what} is not known to kvtier")


@functools.cache
def fields(kind: type) -> tuple[tuple[str, object], ...]:
    """Name and default of each field of a dataclass or a msgspec struct; None where there is no default."""
    found = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    return tuple((field.name, None if field.default in missing else field.default) for field in found)


def _is(value: object, default: object) -> bool:
    return value is default or (isinstance(value, bool | int | float | str) and value == default)
