"""Real vLLM engines that read each other's memory: each in a process of its own, alone or behind a server."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time

import pytest
from nodes import TOKEN
from other_engine import beside
from patience import HANG
from real_engines import Answer, cpu, hit, miss, prompt
from servers.ports import free_port
from servers.stopping import stop
from sizes import some
from test_server import NOISE, of, serving

from kvtier_core.cli import main
from kvtier_fleet import draining
from kvtier_peers.link import Link
from kvtier_peers.settings import Address
from kvtier_testing import Proxy

ASKED, ANOTHER = prompt(140, 530), prompt(141, 530)


def node(*peers, packing="off", patience="10s", capacity="64MiB", **settings):
    """The stack of a node; its address is that of its tier of peers. Engines of tests share no runtime folder."""
    stack = cpu(capacity)
    stack["tiers"][0]["packing"] = packing
    tier = {"type": "peers", "listen": f"127.0.0.1:{free_port()}", "peers": list(peers), "patience": patience}
    tier |= {"token": str(TOKEN), **settings}
    return {**stack, "tiers": [*stack["tiers"], tier]}


def address_of(stack):
    return stack["tiers"][-1]["listen"]


@pytest.fixture
def meets(said):
    """Waits until an engine of this process has met these peers. It tries again only when it is asked."""

    def meets(reader, *addresses):
        unmet = {f"kvtier: peers: {address} shares its frames" for address in addresses}
        deadline = time.monotonic() + HANG
        while unmet := unmet.difference(said()):
            assert time.monotonic() < deadline, "they do not meet"
            reader.manager.tiers[-1].backend.contains([])
            time.sleep(0.02)

    return meets


@pytest.mark.more
def test_an_engine_with_other_ranks_finds_each_head_in_the_memory_of_another(engine, fork_server, model, meets):
    with engine() as plain:
        (truth,) = plain.ask(ASKED)
    first, second = ({**node(), "identity": {"ranks": "any"}} for _ in range(2))
    with beside(fork_server, model, first, tensor_parallel_size=2) as owner:
        assert owner.ask(ASKED).differs(truth) < NOISE
        second["tiers"][-1]["peers"] = [address_of(first)]
        with engine(second) as reader:
            meets(reader, address_of(first))
            assert reader.ask(ASKED)[0].differs(truth) < NOISE
            assert reader.outcomes() == [hit(530, peers=512)]


@pytest.mark.more
@pytest.mark.parametrize(("packing", "dtype"), [("off", "float32"), ("auto", "bfloat16")])
def test_an_answer_from_the_memory_of_another_engine_is_bit_equal(engine, fork_server, model, meets, packing, dtype):
    """Although that engine does nothing meanwhile. Who has read a chunk holds it, too."""
    with engine(cpu(), enable_prefix_caching=True, dtype=dtype) as alone:
        alone.ask(ASKED)
        (expected,) = alone.own_hits(ASKED)
    first, second, third = node(packing=packing), node(packing=packing), node(packing=packing)
    with beside(fork_server, model, first, dtype=dtype) as owner:
        owner.ask(ASKED)
        second["tiers"][-1]["peers"] = [address_of(first)]
        with engine(second, dtype=dtype) as reader:
            meets(reader, address_of(first))
            assert reader.ask(ASKED)[0].differs(expected) == 0
            assert reader.outcomes() == [hit(530, peers=512)]
            assert reader.ask(ASKED)[0].differs(expected) == 0
            assert reader.outcomes() == [hit(530, cpu=512)]
            os.kill(owner.pid, signal.SIGKILL)
            third["tiers"][-1]["peers"] = [address_of(first), address_of(second)]
            with beside(fork_server, model, third, dtype=dtype) as last:
                last.ask(ANOTHER)
                assert last.ask(ASKED).differs(expected) == 0
                assert last.outcome == hit(530, peers=512)
            reader.assert_at_rest()


def below(stack, store):
    """This stack with a store tier, too."""
    return {**stack, "tiers": [stack["tiers"][0], {"capacity": "64MiB", **store}, *stack["tiers"][1:]]}


@pytest.mark.more
@pytest.mark.parametrize(("packing", "dtype"), [("off", "float32"), ("auto", "bfloat16")])
@pytest.mark.parametrize("kind", some(["disk", "gds"]))
def test_an_answer_from_the_disk_of_another_engine_is_bit_equal(
    engine, fork_server, model, meets, tmp_path, kind, packing, dtype
):
    """That engine was restarted, so its arena is empty. The reader computes what is damaged on the disk."""
    stores = {"disk": {"path": str(tmp_path), "min_free": "0B"}, "gds": {"paths": [str(tmp_path)], "mode": "gds"}}
    first = below(node(packing=packing), {"type": kind, **stores[kind]})
    with engine(cpu(), enable_prefix_caching=True, dtype=dtype) as alone:
        (computed,), (expected,) = alone.ask(ASKED), alone.own_hits(ASKED)
    with beside(fork_server, model, first, dtype=dtype) as owner:
        owner.ask(ASKED)
    with beside(fork_server, model, first, dtype=dtype):
        with engine(node(address_of(first), packing=packing), dtype=dtype) as reader:
            meets(reader, address_of(first))
            assert reader.ask(ASKED)[0].differs(expected) == 0
            assert reader.outcomes() == [hit(530, peers=512)]
            reader.assert_at_rest()
        for file in tmp_path.rglob("*.kv"):
            with file.open("r+b") as frame:
                frame.seek(4096)
                frame.write(bytes(64))
        with engine(node(address_of(first), packing=packing), dtype=dtype) as reader:
            meets(reader, address_of(first))
            assert reader.ask(ASKED)[0].differs(computed if kind == "disk" else expected) == 0
            assert reader.outcomes() == [miss(530) if kind == "disk" else hit(530, peers=512)]


@pytest.mark.parametrize(
    ("when", "how"),
    some(
        itertools.product(["before", "found", "read"], [signal.SIGKILL, signal.SIGSTOP]),
        ("found", signal.SIGKILL),
        ("read", signal.SIGKILL),
        ("before", signal.SIGSTOP),
    ),
)
def test_an_owner_that_ends_or_stops_is_a_miss(engine, fork_server, model, meets, monkeypatch, how, when):
    """Before a lookup, between that and the read, and in the middle of a frame."""
    with engine() as plain:
        truth = plain.ask(ASKED)[0]
    first = node()
    with beside(fork_server, model, first) as owner:
        owner.ask(ASKED)
        with engine({**node(address_of(first), patience="1s"), "load_wait": f"{HANG}s"}) as reader:
            meets(reader, address_of(first))
            reader.ask(ANOTHER)
            end = lambda: stop(owner.pid, how)  # noqa: E731
            if when == "before":
                end()
            elif when == "found":
                request = Link.request
                monkeypatch.setattr(Link, "request", lambda link, *asked: end() or request(link, *asked))
            else:
                fill = Link._fill
                monkeypatch.setattr(Link, "_fill", lambda link, view: (len(view) > 4096 and end(), fill(link, view))[1])
            assert reader.ask(ASKED)[0].differs(truth) < NOISE
            assert reader.outcomes()[-1].waited < HANG
            monkeypatch.undo()
            assert reader.ask(ASKED)[0].differs(truth) < NOISE
            assert reader.outcomes()[-1].tiers.keys() == {"cpu"}
            reader.assert_at_rest()
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("rate", "load_wait", "from_first"), some([(125e6, HANG, 512), (5e5, 1, 0)]), ids=["1 Gbit/s", "4 Mbit/s"]
)
def test_over_links_of_50_ms_no_request_waits_beyond_load_wait(
    engine, fork_server, model, meets, longest_step, rate, load_wait, from_first
):
    """Three nodes. What is too slow to come within it, here in eight seconds, is computed, and right."""
    with engine() as plain:
        truths = plain.ask(ASKED, ANOTHER)
    owners = [node() for _ in range(2)]
    with contextlib.ExitStack() as open_now:
        links = [
            open_now.enter_context(Proxy(("127.0.0.1", Address.of(address_of(owner)).port), delay=0.025, rate=rate))
            for owner in owners
        ]
        for owner, asked in zip(owners, (ASKED, ANOTHER), strict=True):
            open_now.enter_context(beside(fork_server, model, owner)).ask(asked)
        addresses = [f"127.0.0.1:{link.port}" for link in links]
        reader = open_now.enter_context(engine({**node(*addresses), "load_wait": f"{load_wait}s"}))
        meets(reader, *addresses)
        answers = [reader.ask(asked)[0] for asked in (ASKED, ANOTHER)]
        outcomes = reader.outcomes()
        assert max(map(Answer.differs, answers, truths)) < NOISE
        assert outcomes[0].tiers.get("peers", 0) == from_first
        assert max(outcome.waited for outcome in outcomes) <= load_wait + longest_step()
        reader.assert_at_rest()


@pytest.mark.parametrize("drained", [False, True])
def test_servers_are_peers(engine, tmp_path, monkeypatch, drained):
    """What the engines of one node have stored those of another read, through its server; also when the first one goes,
    if it was drained.
    """
    folders = [tmp_path / name for name in ("first", "second")]
    addresses = [f"127.0.0.1:{free_port()}" for _ in folders]
    tiers = [
        json.dumps({"type": "peers", "listen": own, "peers": [other], "token": str(TOKEN)})
        for own, other in (addresses, reversed(addresses))
    ]
    for folder in folders:
        folder.mkdir()
    prompts = [prompt(seed, 530) for seed in range(150, 158)]
    with contextlib.ExitStack() as first_server, serving(folders[1], tiers[1], capacity="128MiB"):
        first_server.enter_context(serving(folders[0], tiers[0]))
        with engine(of(folders[0])) as first:
            truths = first.ask(*prompts)
        with engine(of(folders[1])) as second:
            if drained:
                monkeypatch.setattr(draining, "_IN_VAIN", HANG)  # on a busy machine servers meet late
                operators = [f"{folder}/kvtier.sock.http" for folder in folders]
                servers = [option for each in operators for option in ("--server", f"unix:{each}")]
                assert main(["fleet", *servers, "drain", operators[0]]) == 0
                first_server.close()
            for asked, truth in zip(prompts, truths, strict=True):  # until the servers have met
                assert second.ask(asked)[0].differs(truth) < NOISE
            brought = len(prompts) if drained else 1
            assert second.outcomes()[-brought:] == brought * [hit(530, peers=512)], "named by where they came from"
            second.assert_at_rest()
