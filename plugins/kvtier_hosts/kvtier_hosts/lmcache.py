"""`KVTierL2Adapter`: kvtier's store tiers as an L2 adapter of LMCache's multi-process server.

LMCache loads it by name (docs/lmcache-l2.md) and calls it on the threads of its controllers, which wait only in
`close`. Results are drawn from the stores when a controller asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj, TensorMemoryObj
from lmcache.v1.platform import create_event_notifier

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.outside import printable
from kvtier_hosts.model_pages import ModelPages, Page
from kvtier_hosts.pages import PageStore

logger = logging.getLogger("kvtier")

#: Methods of `PageStore`, one for each kind of task.
_STORE, _LOOKUP, _LOAD = "put", "contains", "get"
#: Begins a job in a store for keys with these names, which have these numbers in a task, and returns the ticket.
_Call = Callable[[PageStore, Sequence[bytes], Sequence[int]], int]
#: Models that are logged because they are not served: clients of the host name them.
_MOST_REFUSED = 64
_FIELDS = operator.attrgetter(*(field.name for field in dataclasses.fields(ObjectKey)))


@attrs.define(eq=False)
class _Task:
    """A task of a controller: one call of a store for each prompt's row of keys."""

    names: list[bytes]  #: of its keys, in their order
    nbytes: int = 0  #: of its pages
    calls: int = 0  #: that have not ended
    good: set[bytes] = attrs.field(factory=set)

    def bitmap(self) -> Any:
        """The keys that are good. Of two equal keys, only the last had a page."""
        found = Bitmap(len(self.names))
        for name, number in {name: number for number, name in enumerate(self.names)}.items():
            if name in self.good:
                found.set(number)
        return found

    def stored(self) -> L2StoreResult:
        good = self.good.issuperset(self.names)
        return L2StoreResult(good, self.nbytes if good else 0)


class KVTierL2Adapter(L2AdapterInterface):
    """Objects of LMCache's L1 memory, stored, found and verified by a `PageStore` for each model.

    It claims no capacity and counts no bytes for LMCache: the tiers evict by themselves.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: Any = None):
        """``adapter_params`` has ``config``, the path of a configuration file or its keys, and ``models``: for each
        model, by the name that engines give it, the folder of its weights. Each model has an equal part of the tiers.

        Raises ConfigError.
        """
        super().__init__()
        if not logger.handlers:
            init_logger(logger.name)
        config, models = _checked(adapter_params)
        stack = load_config(config, Registry.discover(), label="adapter_params")
        self._events = {kind: create_event_notifier() for kind in (_STORE, _LOOKUP, _LOAD)}
        self._open_events = dict(self._events)
        self._signals = threading.Lock()  # of `_open_events`; may be taken while the other one is held
        self._lock = threading.Lock()  # of all below
        self._numbers = itertools.count()
        self._tasks: dict[str, dict[int, _Task]] = {kind: {} for kind in self._events}
        self._calls: dict[tuple[str, int], _Task] = {}  # by model and ticket
        self._refused: set[tuple[str, str]] = set()  # models, and the reasons
        self._models: dict[str, ModelPages] = {}
        facts = {"host": f"LMCache {lmcache.__version__}"}
        options: dict[str, Any] = {"replicas": len(models), "told": self._signal}
        try:
            for number, (name, folder) in enumerate(sorted(models.items())):
                self._models[name] = ModelPages(stack, name, Path(folder), facts, replica=number, **options)
        except ConfigError:
            self.close()
            raise

    def get_store_event_fd(self) -> int:
        return int(self._events[_STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[_LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[_LOAD].fileno())

    # -- tasks -------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._transfer(_STORE, keys, objects)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._transfer(_LOAD, keys, objects)

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Objects that are found are not locked: one that a tier evicts before it is loaded is not loaded."""
        pages = {group: _page(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()}
        asked = [pages.get(key.object_group_id) for key in keys]
        return self._submit(_LOOKUP, keys, asked, lambda store, names, _: store.contains(names))

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked."""

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """A task has failed unless every object was taken. What was taken may still be lost, which is a miss later."""
        with self._lock:
            self._draw_results()
            tasks = self._tasks[_STORE]
            ended = [number for number, task in tasks.items() if not task.calls]
            return {number: tasks.pop(number).stored() for number in ended}

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._result(_LOOKUP, task_id)

    def query_load_result(self, task_id: int) -> Any:
        return self._result(_LOAD, task_id)

    def _result(self, kind: str, number: int) -> Any:
        with self._lock:
            self._draw_results()
            tasks = self._tasks[kind]
            ended = number in tasks and not tasks[number].calls
            return tasks.pop(number).bitmap() if ended else None

    def _transfer(self, kind: str, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        pages = [_page_of(each) for each in objects]

        def call(store: PageStore, names: Sequence[bytes], numbers: Sequence[int]) -> int:
            return int(getattr(store, kind)(names, [objects[number].byte_array for number in numbers]))

        return self._submit(kind, keys, pages, call)

    def _submit(self, kind: str, keys: Sequence[ObjectKey], pages: Sequence[Page | None], call: _Call) -> int:
        """Begin a call for the keys of each rank, group and salt: in a lookup they are those of one prompt."""
        rows: dict[tuple[Any, ...], list[int]] = {}
        for number, (key, page) in enumerate(zip(keys, pages, strict=True)):
            rows.setdefault((key.model_name, page, key.kv_rank, key.object_group_id, key.cache_salt), []).append(number)
        task = _Task([_name(key) for key in keys], sum(page.nbytes for page in pages if page), len(rows))
        with self._lock:
            begun = next(self._numbers)
            self._tasks[kind][begun] = task

        def begin(model: str, numbers: Sequence[int], store: PageStore | None) -> None:
            with self._lock:
                if store is not None:
                    ticket = call(store, [task.names[number] for number in numbers], numbers)
                    self._calls[model, ticket] = task
                    return
                task.calls -= 1
            self._signal(kind)

        for (model, page, *_), numbers in rows.items():
            of_model, start = self._model(model, page, kind), functools.partial(begin, model, numbers)
            of_model.when_open(page, start) if of_model else start(None)
        if not rows:
            self._signal(kind)
        return begun

    def _model(self, model: str, page: Page | None, kind: str) -> ModelPages | None:
        if model not in self._models:
            why = "its weights are unknown; name their folder in adapter_params.models"
        elif page is None and kind != _LOOKUP:
            why = "LMCache encodes them (serde), or keeps them outside host memory"
        else:
            return self._models[model]
        with self._lock:
            refused = printable(model), why
            if refused not in self._refused and len(self._refused) < _MOST_REFUSED:
                self._refused.add(refused)
                logger.warning("kvtier: objects of %s are neither stored nor found: %s", *refused)
        return None

    def _draw_results(self) -> None:
        for name, model in self._models.items():
            for result in model.poll():
                task = self._calls.pop((name, result.ticket))
                task.good |= result.keys
                task.calls -= 1

    def _signal(self, kind: str) -> None:
        """On any thread: a task of this kind may have ended."""
        with self._signals:
            if kind in self._open_events:
                self._open_events[kind].notify()

    # -- the life of the server --------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """A model that is no longer served is not healthy: a restart of the server may help."""
        models = {name: model.ended or ("open" if model.is_open else "") for name, model in self._models.items()}
        healthy = not any(model.ended for model in self._models.values())
        return {"is_healthy": healthy, "type": type(self).__name__, "models": models}

    def close(self) -> None:
        """End all tasks, let writes under way finish for a few seconds, and close every tier. May be called twice."""
        for model in self._models.values():
            model.close()
        with self._signals:
            closing, self._open_events = self._open_events, {}
            for each in closing.values():
                each.close()


def _checked(params: Mapping[str, Any]) -> tuple[Any, Mapping[str, str]]:
    """The configuration, and the folders of models. Raises ConfigError."""
    config, models = params.get("config"), params.get("models")
    if set(params) != {"config", "models"} or not isinstance(config, str | Mapping):
        why = f"expected config, a file or its keys, and models; got {sorted(params)}"
        raise ConfigError([Problem("adapter_params", "$", why)])
    if not isinstance(models, Mapping) or not models or not all(isinstance(each, str) for each in models.values()):
        hint = 'write {"NAME": "FOLDER OF ITS WEIGHTS"}'
        raise ConfigError([Problem("adapter_params", "$.models", "it does not name a model", hint)])
    return config, models


def _name(key: ObjectKey) -> bytes:
    """All fields of a key, including those that another LMCache version adds, so that no two keys share a name."""
    return repr(_FIELDS(key)).encode("utf-8", "surrogatepass")


def _page(shapes: Sequence[Any], dtypes: Sequence[Any]) -> Page:
    layout = ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True))
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    return Page(layout, nbytes)


def _page_of(memory: MemoryObj) -> Page | None:
    """None if it is not in this process's memory, or if LMCache has encoded it."""
    if not isinstance(memory, TensorMemoryObj) or memory.raw_data.device.type != "cpu":
        return None
    meta = memory.metadata
    page = _page(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
    return page if memory.get_size() == page.nbytes else None
