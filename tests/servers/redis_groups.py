"""Redis servers that belong together: a cluster, and a master with its replica and sentinels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
from patience import wait_until

from servers.ports import free_port
from servers.redis import IN_MEMORY, RedisServer

#: A replica is up at once, and not seconds later.
_AT_ONCE = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 3, replicas: int = 0) -> Iterator[list[RedisServer]]:
    """Masters that divide the slots, then ``replicas`` of the first ones, all in agreement."""
    folder.mkdir(exist_ok=True)
    of_cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", "15000")
    settings = (*IN_MEMORY, *_AT_ONCE, *of_cluster, "--cluster-require-full-coverage", "no")
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(nodes + replicas):
            server = RedisServer(folder / str(number), free_port(), (*settings, "--cluster-port", str(free_port())))
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        _introduce(servers, nodes)
        yield servers


def _introduce(servers: Sequence[RedisServer], nodes: int) -> None:
    for number, server in enumerate(servers[:nodes]):
        first, last = 16384 * number // nodes, 16384 * (number + 1) // nodes - 1
        server.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for server in servers[1:]:
        bus = server.settings[server.settings.index("--cluster-port") + 1]
        servers[0].ask("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
    wait_until(lambda: all(_knows(each, len(servers)) for each in servers), "the nodes do not find each other")
    for number, replica in enumerate(servers[nodes:]):
        replica.ask("CLUSTER", "REPLICATE", servers[number].ask("CLUSTER", "MYID"))
        wait_until(lambda each=replica: "master_link_status:up" in each.ask("INFO", "replication"), "no replication")
    wait_until(lambda: all(_agrees(each, len(servers)) for each in servers), "the cluster does not come up")


def _knows(server: RedisServer, count: int) -> bool:
    return f"cluster_known_nodes:{count}\r" in server.ask("CLUSTER", "INFO")


def _agrees(server: RedisServer, count: int) -> bool:
    slots = server.ask("CLUSTER", "SLOTS")
    listed = {node[2] for each in slots for node in each[2:]}
    return "cluster_state:ok" in server.ask("CLUSTER", "INFO") and len(listed) == count


@attrs.frozen
class Sentinel:
    """A master, its replica, and sentinels that watch them."""

    master: RedisServer
    replica: RedisServer
    sentinels: Sequence[RedisServer]

    @property
    def addresses(self) -> tuple[str, ...]:
        """As `RedisConfig.sentinels` takes them."""
        return tuple(f"127.0.0.1:{each.port}" for each in self.sentinels)

    def named(self) -> int:
        """The port of the server that the first sentinel calls the master."""
        told = self.sentinels[0].ask("SENTINEL", "MASTER", "kv")
        return int(told[told.index("port") + 1])


@contextlib.contextmanager
def sentinels(folder: Path, count: int = 3) -> Iterator[Sentinel]:
    """A master and a replica of the service ``kv``, and sentinels that notice within a second when it is gone."""
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:

        def started(name: str, *settings: str) -> RedisServer:
            server = RedisServer(folder / name, free_port(), settings)
            stack.callback(server.kill)
            server.start()
            return server

        master = started("master", *IN_MEMORY, *_AT_ONCE)
        replica = started("replica", *IN_MEMORY, *_AT_ONCE, "--replicaof", f"127.0.0.1 {master.port}")
        watching = []
        for number in range(count):
            file = folder / f"sentinel{number}.conf"
            file.write_text(
                f"sentinel monitor kv 127.0.0.1 {master.port} 2\n"
                "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 5000\n"
            )
            watching.append(started(f"sentinel{number}", str(file), "--sentinel"))
        wait_until(lambda: all(_sees_all(each, count) for each in watching), "the sentinels do not find each other")
        yield Sentinel(master, replica, watching)


def _sees_all(sentinel: RedisServer, count: int) -> bool:
    told = sentinel.ask("SENTINEL", "MASTER", "kv")
    facts = dict(zip(told[::2], told[1::2], strict=True))
    return facts["num-other-sentinels"] == str(count - 1) and facts["num-slaves"] == "1"
