"""Every protection of docs/reliability.md and the test that is there for it, a module for each room of the house."""

from __future__ import annotations

from protections import (
    blend,
    bundles,
    commands,
    engine,
    fleet,
    frames,
    hosts,
    identity,
    lookups,
    outside,
    plugins,
    server,
    stack,
    storekit,
    transfer,
    vllm,
)

ROOMS = (
    *(identity, vllm, blend, hosts, engine, server, fleet, stack, lookups),
    *(frames, transfer, storekit, bundles, plugins, commands, outside),
)
MUTANTS = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)
