"""Notices that the weights of a running engine change. vLLM informs its connectors only if it is asked to.

Three things are watched: calls of the workers by `collective_rpc`, any of which may change weights unless it is known
not to; the models' own loaders (`load_weights`); and the parameters, which must be the same objects in the same memory,
not written to by PyTorch, with the same bytes in some places.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.v1.engine.core import EngineCore

#: Number of runs of a parameter in the host's memory that are compared, and bytes of each.
_RUNS, _RUN_NBYTES = 4, 32

#: Calls of vLLM's workers that leave the weights alone, as whole names and as beginnings of names.
_HARMLESS = {"add_lora", "remove_lora", "pin_lora", "compute_weight_checksums", "synchronize_device"}
_HARMLESS_BEGINNINGS = ("get_", "list_", "save_", "reset_", "profile", "check_health", "update_max_model_len")


class WeightWatch:
    """Compares a worker's weights with those of the last `renew`. Call every method on the worker's thread."""

    def __init__(self, models: Iterable[nn.Module], *, experts_move: bool = False):
        """``experts_move``: vLLM itself writes to the parameters of experts, to balance their load."""
        self._models = list(models)
        self._experts_move = experts_move
        self._loaders: set[str] = set()  # that have run since the last renewal
        for model in self._models:
            for module in model.modules():
                if hasattr(type(module), "load_weights"):
                    _note_calls(module, self._loaders)
        self.renew()

    def renew(self) -> None:
        """Compare with the weights as they are now."""
        self._loaders.clear()
        modules = [module for model in self._models for module in model.modules()]
        watched = [each for each in modules if not (self._experts_move and hasattr(each, "get_expert_weights"))]
        self._modules = _Members([module._modules for module in modules])
        self._parameters = _Members([module._parameters for module in watched])
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are a subclass, whose calls are slow
            parameters = self._parameters.now()
            self._readable = [number for number, each in enumerate(parameters) if _is_readable(each)]
            readable = [parameters[number] for number in self._readable]
            self._pointers = list(map(_pointer, readable))
            self._versions = list(map(_version, readable))
            runs = (_runs(each) for each in readable if each.device.type == "cpu" and each.numel())
            self._samples = [(ctypes.c_char * nbytes).from_address(at) for each in runs for at, nbytes in each]
        self._bytes = b"".join(self._samples)

    def changed(self) -> str:
        """How the weights are seen to differ from those of the last renewal; empty if they are not."""
        if self._loaders:
            return f"{min(self._loaders)} has loaded weights"
        if not self._modules.are_the_same() or not self._parameters.are_the_same():
            return "parameters were replaced"
        with torch._C.DisableTorchFunctionSubclass():
            parameters = self._parameters.now()
            readable = [parameters[number] for number in self._readable]
            if list(map(_pointer, readable)) != self._pointers:
                return "parameters have moved in memory"
            if list(map(_version, readable)) != self._versions:
                return "parameters were written to"
        if b"".join(self._samples) != self._bytes:  # of memory that is still theirs, as their addresses are the same
            return "parameters have different bytes"
        return ""


class _Members:
    """The tensors in some of a model's tables, without keeping the model alive."""

    def __init__(self, tables: Sequence[Mapping[str, Any]]):
        self._tables = tables
        self._known = [weakref.ref(each) for each in self.now()]

    def now(self) -> list[Any]:
        return [each for table in self._tables for each in table.values() if each is not None]

    def are_the_same(self) -> bool:
        now = self.now()
        return len(now) == len(self._known) and all(ref() is each for ref, each in zip(self._known, now, strict=True))


_pointer = operator.methodcaller("data_ptr")


def _version(tensor: torch.Tensor) -> int:
    """How often PyTorch has written to a tensor. Those of inference mode have no count."""
    return 0 if tensor.is_inference() else tensor._version


def _is_readable(tensor: torch.Tensor) -> bool:
    """Does it have an address? A quantized one may be made of others."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of the runs of a tensor that are compared."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    base, nbytes = tensor.data_ptr(), (last + 1) * tensor.element_size()
    if nbytes <= _RUNS * _RUN_NBYTES:
        yield base, nbytes
        return
    for run in range(_RUNS):
        yield base + nbytes * (2 * run + 1) // (2 * _RUNS) - _RUN_NBYTES // 2, _RUN_NBYTES


def _note_calls(module: Any, called: set[str]) -> None:
    """Note each call of a module's own loader, before it begins and when it has ended."""
    name, owner = f"{type(module).__name__}.load_weights", weakref.ref(module)  # which its own attribute must not keep
    load = vars(module).get("load_weights")  # another connector may note the calls, too
    unbound = type(module).load_weights

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        try:
            return load(*args, **kwargs) if load else unbound(owner(), *args, **kwargs)
        finally:
            called.add(name)

    module.load_weights = noted


def models_of_caller() -> list[nn.Module]:
    """The models of the model runner that calls its connector; none if it has another form. vLLM hands over none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame:
        runner: Any = frame.f_locals.get("self")
        if hasattr(runner, "model") and hasattr(runner, "get_model"):
            drafters = (getattr(runner, name, None) for name in ("drafter", "speculator"))
            models = [runner.model, *(getattr(drafter, "model", None) for drafter in drafters)]
            found = [_unwrapped(model) for model in models if model is not None]
            return found if all(isinstance(model, nn.Module) for model in found) else []
        frame = frame.f_back
    return []


def _unwrapped(model: Any) -> Any:
    """vLLM's first model runner wraps models whose forwards are CUDA graphs, or run in micro-batches."""
    return model if isinstance(model, nn.Module) or not hasattr(model, "unwrap") else model.unwrap()


def may_change_weights(method: str | Callable) -> bool:
    """May a worker that is called for this change its weights?"""
    return not isinstance(method, str) or not (method in _HARMLESS or method.startswith(_HARMLESS_BEGINNINGS))


def follow_calls(told: Callable[[EngineCore, str], None]) -> None:
    """Have ``told`` called with the engine and a name, when its workers have done what may have changed weights.

    Calls of a user, a trainer or a server reach an engine as `EngineCore.collective_rpc`, between two steps. The engine
    itself calls its workers in other ways. May be repeated.
    """
    call = EngineCore.collective_rpc
    if listeners := getattr(call, "kvtier_listeners", None):
        listeners[told] = None
        return
    listeners = {told: None}

    @functools.wraps(call)
    def collective_rpc(engine: EngineCore, method: str | Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(engine, method, *args, **kwargs)
        finally:
            if may_change_weights(method):
                for each in listeners:
                    each(engine, method if isinstance(method, str) else "a function")

    vars(collective_rpc)["kvtier_listeners"] = listeners
    EngineCore.collective_rpc = collective_rpc
