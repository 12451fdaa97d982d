"""Writes down a live server's traffic, for `kvtier simulate`: when, how long, and which chunks recur.

No text and no token. A chunk's id is a digest of its key under a salt that this process draws and tells nobody: it
says that two prompts began alike, and not how, and it means nothing in the recording of another engine or start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence

from kvtier_core.config.model import StackConfig
from kvtier_core.errors import ConfigError
from kvtier_core.transfer.io_pool import IOPool, Outcome
from kvtier_core.types import ChunkKey, Nbytes

logger = logging.getLogger("vllm.kvtier")

#: More lines than this do not wait for a slow disk; further ones are not recorded.
_MOST_WAITING = 1000
#: For how long the end of an engine waits for the last lines, in seconds.
_PATIENCE = 1.0


class Recorder:
    """Every method on the scheduler's thread; files are written on a thread of its own."""

    def __init__(self, config: StackConfig, replicas: int = 1, clock: Callable[[], float] = time.monotonic):
        """``replicas`` engines write to this folder, each an equal part of what fits. Raises ConfigError."""
        self._chunk_tokens = config.chunk_tokens
        self._clock = clock
        self._began = clock()
        self._salt = secrets.token_bytes(32)
        self._dropped = 0
        folder = config.record.path
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            taken = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
            self._room = (config.record.capacity - taken) // replicas
            self.path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}.jsonl"
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError([config.problem("$.record.path", f"cannot be written: {error}")]) from error
        self._pool = IOPool("record")
        logger.info("kvtier: records this traffic in %s, at most %s", self.path, Nbytes(max(0, self._room)))

    def record(self, since: float, tokens: int, generated: int, keys: Sequence[ChunkKey], reason: str) -> None:
        """A request that came at ``since``, and ended now."""
        self._pool.step()
        if self._room <= 0:
            return
        if self._pool.jobs >= _MOST_WAITING:
            self._dropped += 1
            return
        line = {
            "timestamp": round((since - self._began) * 1000),
            "input_length": tokens,
            "output_length": generated,
            "chunk_tokens": self._chunk_tokens,
            "finish_reason": reason,
            "hash_ids": [self._id(key) for key in keys],
        }
        text = f"{json.dumps(line)}\n".encode()
        self._room -= len(text)
        if self._room < 0:
            logger.info("kvtier: the recording is full and ends here: %s", self.path)
            return
        self._pool.submit_store(lambda: self._write(text), self._written)

    def close(self) -> None:
        """May be called twice. A line that a disk holds up is left behind."""
        deadline = self._clock() + _PATIENCE
        while self._pool.jobs and self._clock() < deadline:
            self._pool.wait(0.1)
            self._pool.step()
        if self._pool.close(_PATIENCE) and self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1
        if self._dropped:
            logger.warning("kvtier: %d requests were not recorded: the disk was too slow", self._dropped)
            self._dropped = 0

    def _id(self, key: ChunkKey) -> int:
        """A positive number that fits into a signed word."""
        return int.from_bytes(hashlib.blake2b(key, digest_size=8, key=self._salt).digest()) >> 1

    def _write(self, text: bytes) -> None:
        """On a thread."""
        while text:
            text = text[os.write(self._file, text) :]

    def _written(self, outcome: Outcome) -> None:
        if outcome.error is not None and self._room > 0:
            self._room = 0
            logger.warning("kvtier: recording ends: %s", outcome.error)
