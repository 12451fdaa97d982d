"""What digests, lookups and reads cost in a fleet of peers, with the real digests and stacks without bytes."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import attrs
import numpy as np

from benchmarks.measure import Case, Table, interleaved, progress, scratch, sized
from kvtier_core.policies.lru import LruConfig
from kvtier_core.types import ChunkKey, Nbytes
from kvtier_peers.digest import FINGERPRINT_NBYTES, Changes, Digest, Memory
from kvtier_peers.link import Following, Link
from kvtier_peers.listener import pace
from kvtier_peers.table import DigestTable
from kvtier_simulate import stacks
from kvtier_simulate.dry_run import Clock, open_dry_run
from kvtier_simulate.replay import serve
from kvtier_simulate.study import layout_of
from kvtier_simulate.traces import Trace, read_trace

NODES = sized((10, 100, 1000), (10,))
SHOWN = 4096  # chunks of a node: 64 GiB in chunks of 16 MiB, 128 tokens of an 8B model
KEYS = 128
ROUNDS = sized(21, 1)
ABSENT = sized(1 << 17, 1 << 10)  # keys that no node has

#: The made-up trace: sessions whose prompts grow by two chunks a turn, behind one of twenty system prompts.
SLOTS, SYSTEM, TURNS, PROMPTS, SESSIONS = 96, 4, 12, 24, 4
RATE = 0.5  # prompts a second and node
CHUNK_TOKENS, TOKEN_NBYTES = 512, 128 << 10
HEAD_NBYTES = 24 + 13  # of changes, and of the question for the next ones


def tables(folder: Path) -> Iterator[Table]:
    exchange = _exchange()
    yield Table(
        title="Peers: digests and lookups in a fleet",
        says=f"Each other node shows {SHOWN} chunks of its own. A lookup is of {KEYS} keys that no node has, each "
        f"time of others: median (min to max) of {ROUNDS} rounds. Found in vain is the share of {ABSENT} absent keys "
        "that a digest seems to have. To send 32 changes to one peer, to receive and to apply them takes "
        f"{exchange * 1e6:.0f} µs of one process that does both, over TCP on the loopback interface; the last columns "
        "are how often a node may send them, and the share of a core that sending and receiving take if all nodes "
        "change all the time.",
        header=(
            "nodes",
            "lookup µs",
            "found in vain",
            "MiB of memory",
            "MiB received at the start",
            "ms between changes",
            "of a core",
        ),
        rows=[_lookups(nodes, exchange) for nodes in NODES],
    )
    rows = []
    with scratch(folder) as place:
        for nodes in NODES:
            trace = _made_up(place, nodes)
            for routing in ("any node", "that of the session"):
                progress(f"fleet: {nodes} nodes, {len(trace.prompts)} prompts, each to {routing}")
                rows.append(_replayed(trace, nodes, routing))
    yield Table(
        title="Peers: a trace on a fleet",
        says=f"{PROMPTS} prompts a node, {RATE} a second: sessions of {TURNS} turns that grow by two chunks each, "
        f"{SESSIONS} at a time a node, behind one of 20 system prompts of {SYSTEM} chunks; chunks of {CHUNK_TOKENS} "
        f"tokens, {SLOTS} slots and LRU a node, cold at the start. Shares are of all tokens of prompts. Stale: found "
        "in a digest, and gone by then. Digests are those of the plugin, looked at as often as it looks.",
        header=(
            "nodes",
            "a prompt goes to",
            "own arena",
            "with peers",
            "found in vain",
            "stale",
            "kB/s of digests a node sends",
            "of what it reads",
        ),
        rows=rows,
    )


# -- costs -------------------------------------------------------------------------------------------


def _lookups(nodes: int, exchange: float) -> tuple[object, ...]:
    progress(f"fleet: digests of {nodes} nodes")
    tracemalloc.start()
    digests: DigestTable[int] = DigestTable()
    for node in range(nodes):
        shown = np.unique(np.frombuffer(os.urandom(SHOWN * FINGERPRINT_NBYTES), np.uint32))
        digests.apply(digests.enter(node), Changes(0, 1, come=shown))
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    absent = [ChunkKey(os.urandom(32)) for _ in range(ABSENT)]
    others = cycle(absent[at : at + KEYS] for at in range(0, ABSENT, KEYS))  # the last ones are in no cache
    times = interleaved([Case("lookup", lambda: digests.holders(next(others)))], ROUNDS, repeats=1)
    vain = sum(map(bool, digests.holders(absent))) / ABSENT
    wait = pace(nodes, 0)
    seconds = times.seconds["lookup"]
    spread = f"{times.median('lookup') * 1e6:.0f} ({min(seconds) * 1e6:.0f} to {max(seconds) * 1e6:.0f})"
    mib = f"{nodes * SHOWN * FINGERPRINT_NBYTES / (1 << 20):.1f}"
    return (
        nodes,
        spread,
        f"{vain:.4%}",
        f"{memory / (1 << 20):.0f}",
        mib,
        f"{wait * 1e3:.0f}",
        (f"{nodes * exchange / wait:.1%}"),
    )


def _exchange(times: int = 2000) -> float:
    """Seconds to ask for 32 changes, to send and receive them, and to apply them to a digest of `SHOWN` chunks."""
    shown = np.unique(np.frombuffer(os.urandom(SHOWN * FINGERPRINT_NBYTES), np.uint32))
    some, others = shown[:16], shown[16:32]
    digests: DigestTable[str] = DigestTable()
    number = digests.enter("the sender")
    version = digests.apply(number, Changes(0, 1, come=np.setdiff1d(shown, others)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Link(socket.create_connection(server.getsockname()), 10.0)
        theirs = Link(server.accept()[0], 10.0)

    def answer() -> None:
        for at in range(times):
            question = theirs.question()
            assert isinstance(question, Following)
            changed = (others, some) if at % 2 else (some, others)
            theirs.tell(Changes(question.version, question.version + 1, *changed))

    thread = threading.Thread(target=answer)
    thread.start()
    begun = time.process_time()
    for _ in range(times):
        version = digests.apply(number, ours.follow(version, 1.0))
    thread.join()
    ours.close()
    theirs.close()
    return (time.process_time() - begun) / times


# -- a trace -----------------------------------------------------------------------------------------


def _made_up(folder: Path, nodes: int) -> Trace:
    draw = random.Random(nodes)
    sessions: list[list[int]] = [[] for _ in range(SESSIONS * nodes)]
    chunks = iter(range(20 * SYSTEM, 1 << 40))
    path = folder / f"fleet-{nodes}.jsonl"
    with path.open("w") as file:
        for number in range(PROMPTS * nodes):
            at = draw.randrange(len(sessions))
            if len(sessions[at]) in (0, SYSTEM + 2 * TURNS):
                system = draw.randrange(20)
                sessions[at] = [system * SYSTEM + i for i in range(SYSTEM)]
            sessions[at] += [next(chunks), next(chunks)]
            line = {
                "timestamp": number * 1000 / (RATE * nodes),
                "input_length": len(sessions[at]) * CHUNK_TOKENS,
                "output_length": 1,
                "hash_ids": sessions[at],
            }
            file.write(json.dumps(line) + "\n")
    return read_trace(path, CHUNK_TOKENS)


class _Node:
    def __init__(self, chunk_tokens: int, digests: DigestTable[_Node]):
        layout = layout_of(chunk_tokens, TOKEN_NBYTES)
        capacity = Nbytes(SLOTS * layout.frame_nbytes)
        self.manager = open_dry_run(stacks.stack_of([capacity], [LruConfig()], chunk_tokens), layout, Clock(), SLOTS)
        memory = Memory(self.manager.arenas[0].index.resident)
        self.digest = Digest(b"", lambda: [memory])
        self.number, self.version = digests.enter(self), 0
        self.read = Counter[str]()

    def has(self, key: ChunkKey) -> bool:
        return self.manager.arenas[0].has(key)


@attrs.define
class _Counts:
    tokens: int = 0
    own: int = 0
    of_peers: int = 0
    keys: int = 0
    vain: int = 0
    stale: int = 0
    read_nbytes: int = 0
    sent_nbytes: int = 0


def _replayed(trace: Trace, count: int, routing: str) -> tuple[object, ...]:
    digests: DigestTable[_Node] = DigestTable()
    nodes = [_Node(trace.chunk_tokens, digests) for _ in range(count)]
    draw, counts, changed, due = random.Random(1), _Counts(), dict[int, _Node](), 0.0
    of_session: dict[ChunkKey, int] = defaultdict(lambda: draw.randrange(count))
    seen: set[ChunkKey] = set()
    for prompt in trace.prompts:
        if prompt.at >= due:
            due = prompt.at + pace(count, 0)
            for node in changed.values():
                _publish(node, digests, count, counts)
            changed.clear()
        number = draw.randrange(count) if routing == "any node" else of_session[prompt.path[SYSTEM]]
        node = changed[number] = nodes[number]
        own = len(serve(node.manager, prompt.path, Counter()))
        read = _of_peers(prompt.path[own:], node, digests, counts, seen)
        counts.tokens += prompt.tokens
        counts.own += trace.tokens_in(prompt, own)
        counts.of_peers += trace.tokens_in(prompt, own + read) - trace.tokens_in(prompt, own)
        counts.read_nbytes += read * trace.chunk_tokens * TOKEN_NBYTES
        seen.update(prompt.path)
    for node in nodes:
        node.manager.close()
    seconds = trace.prompts[-1].at
    return (
        count,
        routing,
        f"{counts.own / counts.tokens:.3f}",
        f"{(counts.own + counts.of_peers) / counts.tokens:.3f}",
        counts.vain,
        f"{counts.stale / max(1, counts.keys):.2%}",
        f"{counts.sent_nbytes / seconds / count / 1e3:.2f}",
        f"{counts.sent_nbytes / max(1, counts.read_nbytes):.5%}",
    )


def _publish(node: _Node, digests: DigestTable[_Node], count: int, counts: _Counts) -> None:
    node.digest.look()
    changes = node.digest.since(node.version, 0)
    node.version = digests.apply(node.number, changes)
    counts.sent_nbytes += (count - 1) * (HEAD_NBYTES + len(changes) * FINGERPRINT_NBYTES)


def _of_peers(
    path: tuple[ChunkKey, ...], own: _Node, digests: DigestTable[_Node], counts: _Counts, seen: set[ChunkKey]
) -> int:
    """How many of these chunks peers have, from the first on, as digests and then their arenas say."""
    run, broken = 0, False
    for key, nodes in zip(path, digests.holders(path), strict=True):
        found = [node for node in nodes if node is not own]
        is_there = any(node.has(key) for node in found)
        counts.keys += bool(found)
        counts.vain += bool(found) and key not in seen
        counts.stale += bool(found) and key in seen and not is_there
        broken = broken or not is_there
        run += not broken
    return run
