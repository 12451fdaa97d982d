"""A process that asks LMCache's multi-process server what an engine's scheduler asks it. Runs in LMCache's environment.

Arguments: the server's URL, the number of prompts, of chunks in each, of tokens in a chunk, and `fill` or nothing. A
line on stdin has the seconds for which it asks, or 0: once. It answers with the seconds of each lookup, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from typing import Any

from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

MODEL, INSTANCE = "benchmark", 1
PATIENCE = 60.0


def main(url: str, prompts: str, chunks: str, chunk_tokens: str, fill: str = "") -> None:
    client = RequestClientFactory.create(url)
    length = int(chunks) * int(chunk_tokens)
    asked = [random.Random(number).choices(range(128_000), k=length) for number in range(int(prompts))]
    if fill:
        _fill(client, asked, int(chunk_tokens))
    print(json.dumps([]), flush=True)  # it is ready
    requests = itertools.count()
    for line in sys.stdin:
        ends = time.perf_counter() + float(line)
        times: list[float] = []
        while not times or time.perf_counter() < ends:
            seconds, ending = _lookup(client, asked[next(requests) * 7919 % len(asked)], int(chunks))
            times.append(seconds)
        for each in ending:
            each.result(PATIENCE)
        print(json.dumps(times), flush=True)
    client.close()


def _fill(client: Any, prompts: list[list[int]], chunk_tokens: int) -> None:
    """Store all prompts as its workers do that copy themselves; slots are small, and what is in them is not written."""
    layout = RegisterEngineDrivenContextPayload(INSTANCE, MODEL, 1, 16, 1, 8, "bfloat16", False, chunk_tokens)
    client.register_kv_cache_engine_driven_context(layout).result(PATIENCE)
    for tokens in prompts:
        key = _key(tokens, worker_id=0)
        prepared = client.prepare_store(key, INSTANCE).result(PATIENCE)
        stored = client.commit_store(key, INSTANCE, b"").result(PATIENCE)
        if not stored or len(prepared.context["slots"]) * chunk_tokens != len(tokens):
            raise RuntimeError("it has not stored a prompt")


def _lookup(client: Any, tokens: list[int], chunks: int) -> tuple[float, list[Any]]:
    """Seconds until the scheduler knows, and the calls that end the request, for which its connector does not wait."""
    begin = time.perf_counter()
    key = _key(tokens)
    client.lookup(key, 1).result(PATIENCE)
    while (found := client.query_prefetch_status(key.request_id).result(PATIENCE)) is None:
        pass
    seconds = time.perf_counter() - begin
    if found != chunks:
        raise RuntimeError(f"a prompt that the server holds was not found: {found}")
    return seconds, [client.free_lookup_locks(key, 1), client.end_session(key.request_id)]


_ids = itertools.count()


def _key(tokens: list[int], worker_id: int | None = None) -> IPCCacheServerKey:
    return IPCCacheServerKey(
        MODEL, 1, worker_id, tuple(tokens), 0, len(tokens), f"{os.getpid()} {next(_ids)}", num_kv_readers=1
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
