"""Records a live engine's traffic for `kvtier simulate`: when requests came, how long they were, which chunks recur.

A recording contains no text and no token. A chunk's id is a digest of its key under a random salt of this process: it
shows that two prompts share a prefix, not which one, and cannot be related to another recording.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Observer, ObserverConfig, OpenContext
from kvtier_core.storekit.trial import new_file
from kvtier_core.types import ChunkKey, Event, EventKind, Nbytes, size

logger = logging.getLogger("kvtier")


@attrs.frozen
class RecordingConfig(ObserverConfig):
    """The keys of ``type: recording``."""

    type: ClassVar[str] = "recording"
    path: pathlib.Path  #: a folder; each start of an engine adds a file
    #: Recording ends when all files in the folder together have this number of bytes.
    capacity: Nbytes = attrs.field(default=Nbytes(256 << 20), validator=attrs.validators.gt(Nbytes(0)))

    def open(self, ctx: OpenContext) -> Observer:
        """Begin a file. Raises BackendError."""
        try:
            return Recording(self, ctx)
        except OSError as error:
            raise BackendError(f"cannot write {self.path}: {error}") from error


class Recording(Observer):
    """A line of JSON for each request that has ended, in a file that only its owner can access."""

    def __init__(self, config: RecordingConfig, ctx: OpenContext, clock: Callable[[], float] = time.monotonic):
        """Engines that share the configuration each use an equal part of the capacity that is left. Raises OSError."""
        self._chunk_tokens = ctx.layout.tokens
        self._clock = clock  # not the events' own, which may be set
        self._began = clock()
        self._salt = secrets.token_bytes(32)
        self._arrived: dict[str, tuple[float, Event]] = {}  # when, by request; until it ends
        taken = sum(file.stat().st_size for file in config.path.glob("*.jsonl"))
        self._room = (config.capacity - taken) // ctx.replicas
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}.jsonl"
        self._file = new_file(config.path, name, os.O_WRONLY, trial=ctx.checking)
        logger.info("kvtier: recording traffic to %s, up to %s", config.path / name, size(max(0, self._room)))

    def observe(self, events: Sequence[Event]) -> None:
        """Append a line for each request that has ended, while there is room. Raises OSError."""
        for event in events:
            if event.kind is EventKind.ARRIVED:
                self._arrived[event.request] = self._clock(), event
            elif event.kind is EventKind.FINISHED and (arrived := self._arrived.pop(event.request, None)):
                self._write(*arrived, event)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, at: float, arrived: Event, finished: Event) -> None:
        if self._room <= 0:
            return
        line = {
            "timestamp": round((at - self._began) * 1000),
            "input_length": arrived.tokens,
            "output_length": finished.tokens - arrived.tokens,
            "chunk_tokens": self._chunk_tokens,
            "finish_reason": finished.why,
            "hash_ids": [] if arrived.why else [self._id(key) for key in arrived.keys],
        }
        text = f"{json.dumps(line)}\n".encode()
        self._room -= len(text)
        if self._room < 0:
            logger.info("kvtier: recording stopped: the folder has its capacity")
            return
        while text:
            text = text[os.write(self._file, text) :]

    def _id(self, key: ChunkKey) -> int:
        """The id of a chunk: a number that fits into a signed 64-bit word, and is not negative."""
        return int.from_bytes(hashlib.blake2b(key, digest_size=8, key=self._salt).digest()) >> 1
