"""What digests, lookups and reads cost in a fleet of peers, with the real digests and stacks without bytes."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
import tracemalloc
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import attrs

from benchmarks.measure import Case, Table, interleaved, progress, scratch, sized
from kvtier_core.policies.lru import LruConfig
from kvtier_core.types import ChunkKey, Nbytes
from kvtier_peers.digest import FINGERPRINT_NBYTES, Changes, Copy, Digest, Memory, fingerprints, holders
from kvtier_peers.link import Following, Link
from kvtier_peers.listener import pace
from kvtier_simulate import stacks
from kvtier_simulate.dry_run import Clock, open_dry_run
from kvtier_simulate.replay import serve
from kvtier_simulate.study import layout_of
from kvtier_simulate.traces import Trace, read_trace
from kvtier_testing.samples import make_keys

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
        says=f"Each other node shows {SHOWN} chunks of its own. A lookup is of {KEYS} keys that no node has: "
        f"median (min to max) of {ROUNDS} rounds. Found in vain is the share of {ABSENT} absent keys that a digest "
        "seems to have. To send 32 changes to one peer and to receive them takes "
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
    copies = [_copy_of(os.urandom(SHOWN * FINGERPRINT_NBYTES)) for _ in range(nodes)]
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    times = interleaved([Case("lookup", partial(holders, make_keys(KEYS), copies))], ROUNDS, repeats=3)
    wanted = set(fingerprints([ChunkKey(os.urandom(32)) for _ in range(ABSENT)]))
    vain = len(set().union(*(copy.shown(wanted) for copy in copies))) / len(wanted)
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


def _copy_of(shown: bytes) -> Copy:
    copy = Copy()
    copy.apply(Changes(0, 1, come=frozenset(array("I", shown))))
    return copy


def _exchange(times: int = 2000) -> float:
    """Seconds to ask for 32 changes, and to send and receive them."""
    draw = random.Random(0)
    changes = [frozenset(draw.getrandbits(32) for _ in range(16)) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Link(socket.create_connection(server.getsockname()), 10.0)
        theirs = Link(server.accept()[0], 10.0)

    def answer() -> None:
        for _ in range(times):
            assert isinstance(theirs.question(), Following)
            theirs.tell(Changes(1, 2, *changes))

    thread = threading.Thread(target=answer)
    thread.start()
    begun = time.process_time()
    for _ in range(times):
        ours.follow(1, 1.0)
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
    def __init__(self, chunk_tokens: int):
        layout = layout_of(chunk_tokens, TOKEN_NBYTES)
        capacity = Nbytes(SLOTS * layout.frame_nbytes)
        self.manager = open_dry_run(stacks.stack_of([capacity], [LruConfig()], chunk_tokens), layout, Clock(), SLOTS)
        memory = Memory(self.manager.arenas[0].index.resident)
        self.digest = Digest(b"", lambda: [memory])
        self.copy = Copy()  #: that of every other node
        self.read = Counter[str]()

    def has(self, key: ChunkKey) -> bool:
        return self.manager.arenas[0].has(key)

    def shown(self, wanted: set[int]) -> set[int]:
        return self.copy.shown(wanted)


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
    nodes = [_Node(trace.chunk_tokens) for _ in range(count)]
    draw, counts, changed, due = random.Random(1), _Counts(), dict[int, _Node](), 0.0
    of_session: dict[ChunkKey, int] = defaultdict(lambda: draw.randrange(count))
    seen: set[ChunkKey] = set()
    for prompt in trace.prompts:
        if prompt.at >= due:
            due = prompt.at + pace(count, 0)
            for node in changed.values():
                _publish(node, count, counts)
            changed.clear()
        number = draw.randrange(count) if routing == "any node" else of_session[prompt.path[SYSTEM]]
        node = changed[number] = nodes[number]
        own = len(serve(node.manager, prompt.path, Counter()))
        read = _of_peers(prompt.path[own:], node, nodes, counts, seen)
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


def _publish(node: _Node, count: int, counts: _Counts) -> None:
    node.digest.look()
    changes = node.digest.since(node.copy.version, 0)
    node.copy.apply(changes)
    counts.sent_nbytes += (count - 1) * (HEAD_NBYTES + len(changes) * FINGERPRINT_NBYTES)


def _of_peers(path: tuple[ChunkKey, ...], own: _Node, nodes: list[_Node], counts: _Counts, seen: set[ChunkKey]) -> int:
    """How many of these chunks peers have, from the first on, as digests and then their arenas say."""
    run, broken = 0, False
    for key, found in zip(path, holders(path, [node for node in nodes if node is not own]), strict=True):
        is_there = any(node.has(key) for node in found)
        counts.keys += bool(found)
        counts.vain += bool(found) and key not in seen
        counts.stale += bool(found) and key in seen and not is_there
        broken = broken or not is_there
        run += not broken
    return run
