"""Records a live server's traffic for `kvtier simulate`: when requests came, how long they were, which chunks recur.

A recording contains no text and no token. A chunk's id is a digest of its key under a random salt of this process: it
shows that two prompts share a prefix, not which one, and cannot be related to another recording.
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
from kvtier_core.forks import ProcessBound
from kvtier_core.storekit.trial import new_file
from kvtier_core.types import ChunkKey, size
from kvtier_core.work.io_pool import IOPool, Outcome

logger = logging.getLogger("kvtier")

#: Maximum number of lines that wait for a slow disk; further requests are not recorded.
_MAX_WAITING = 1000
#: Seconds that `close` waits for the last lines to be written.
_CLOSE_TIMEOUT = 1.0


class Recorder(ProcessBound):
    """One recording. Call every method on the scheduler's thread; the file is written on another thread."""

    def __init__(
        self,
        config: StackConfig,
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        trial: bool = False,
    ):
        """Begin a new file in the configured folder; in a ``trial``, one that nobody finds.

        ``replicas`` engines write to the folder; each may use an equal part of the capacity that is left. Raises
        ConfigError if that is not possible.
        """
        self._chunk_tokens = config.chunk_tokens
        self._clock = clock
        self._began = clock()
        self._salt = secrets.token_bytes(32)
        self._dropped = 0
        assert config.record is not None, "no recording is configured"
        folder = config.record.path
        try:
            taken = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
            self._room = (config.record.capacity - taken) // replicas
            self.path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}.jsonl"
            self._file = new_file(folder, self.path.name, os.O_WRONLY, trial=trial)
        except OSError as error:
            raise ConfigError([config.problem("$.record.path", f"cannot be written: {error}")]) from error
        self._pool = IOPool("record")
        logger.info("kvtier: recording traffic to %s, up to %s", self.path, size(max(0, self._room)))

    def record(self, since: float, tokens: int, generated: int, keys: Sequence[ChunkKey], reason: str) -> None:
        """Record a request that arrived at ``since``, by the recorder's clock, and has ended now.

        ``tokens`` and ``generated`` are the lengths of its prompt and of its answer; ``keys`` are those of the prompt.
        """
        self._pool.step()
        if self._room <= 0:
            return
        if self._pool.jobs >= _MAX_WAITING:
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
            logger.info("kvtier: recording stopped: the file is full: %s", self.path)
            return
        self._pool.submit_store(lambda: self._write(text), self._written)

    def close(self) -> None:
        """Write the last lines, within a second. May be called twice."""
        deadline = self._clock() + _CLOSE_TIMEOUT
        while self._pool.jobs and self._clock() < deadline:
            self._pool.wait(0.1)
            self._pool.step()
        if self._pool.close(_CLOSE_TIMEOUT) and self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1
        if self._dropped:
            logger.warning("kvtier: %d requests were not recorded: the disk was too slow", self._dropped)
            self._dropped = 0

    def _id(self, key: ChunkKey) -> int:
        """The id of a chunk: a number that fits into a signed 64-bit word, and is not negative."""
        return int.from_bytes(hashlib.blake2b(key, digest_size=8, key=self._salt).digest()) >> 1

    def _write(self, text: bytes) -> None:
        """Append to the file, on the pool's thread."""
        while text:
            text = text[os.write(self._file, text) :]

    def _written(self, outcome: Outcome) -> None:
        if outcome.error is not None and self._room > 0:
            self._room = 0
            logger.warning("kvtier: recording stopped: %s", outcome.error)
