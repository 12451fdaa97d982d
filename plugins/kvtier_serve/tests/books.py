"""Recounts what a server has lent from its own tables: whatever happened, all of them say the same."""

from __future__ import annotations

from collections import Counter

from kvtier_serve.kept.journal import JournalError, _records
from kvtier_serve.server import Server
from kvtier_serve.tenants import Tenants


def recount(server: Server) -> None:
    """Compare the tables of a server; on the owner's thread, or once that has ended."""
    spaces = list(server.spaces)
    for space in spaces:
        assert all(space in session._holders for session in space.sessions)
        for arena in space.stack.arenas:
            _slots_are_of_one_use(arena)
            _tenants_have_what_they_filled(arena)
            _pins_belong_to_holders(arena, space)
            _journal_says_the_same(arena, server.spaces._adoptions)
    tenants, counted = server.spaces.tenants, Counter()
    for space in spaces:
        for arena in space.stack.arenas:
            counted.update({tenant: arena.used_by(tenant) for tenant in arena._chunks_of})
    if len(server.spaces._stacks) == sum(len(space.stack.arenas) for space in spaces):  # none is being closed
        assert used(tenants) == counted
    for tenant, nbytes in used(tenants).items():
        quota = tenants.quota(tenant)
        assert (tenant in tenants.over_soft) >= (quota.soft is not None and nbytes > quota.soft)
        assert (tenant in tenants.over_hard) >= (quota.hard is not None and nbytes > quota.hard)
    _extents_belong_to_stacks(server)
    for session in server.sessions.values():
        assert set(session._holders) == {session.space, *session._former} <= {*spaces}
    for space in spaces:
        if not space.sessions:
            assert not _engines_among(space.stack.pins_by_holder()) and not space.stack._reservations


def used(tenants: Tenants) -> dict[str, int]:
    """Bytes of all arenas, by tenant."""
    return {tenant: nbytes for tenant in tenants.names if (nbytes := tenants.used_by(tenant))}


def _engines_among(holders) -> set[str]:
    return {holder for holder in holders if holder[0].isdigit() and not holder.startswith("0/")}


def _slots_are_of_one_use(arena) -> None:
    resident = {arena.index.resident.place(key): key for key in arena.index.resident}
    reserved = {slot: key for key, slot in arena._reserved.items()}
    used = {**resident, **reserved}
    assert len(used) == len(resident) + len(reserved) and len(set(arena._free)) == len(arena._free)
    assert used.keys().isdisjoint(arena._free) and arena._invalidated.keys() <= used.keys()
    assert arena._key_at == used
    assert arena._since.keys() <= arena._reserved.keys()
    condemned = {*arena._uncovered, *arena._overwritten}
    assert condemned.isdisjoint(used) and condemned.isdisjoint(arena._free) and arena._condemned <= used.keys()
    taken = used.keys() | set(arena._free) | condemned
    assert arena._recalled <= taken and arena._slots == len(taken) - len(arena._recalled)
    assert arena.memory._used == taken


def _tenants_have_what_they_filled(arena) -> None:
    keys = set(arena._key_at.values())
    assert arena._tenant_of.keys() == arena._named_by.keys() == keys
    bounded = {key: tenant for tenant, chunks in arena._chunks_of.items() for key in chunks}
    assert arena._tenant_of == bounded and all(arena._chunks_of.values())
    named = {key: tenant for tenant, chunks in arena._named.items() for key in chunks}
    assert arena._named_by == named and all(arena._named.values())


def _pins_belong_to_holders(arena, space) -> None:
    assert arena._pinned == sum(arena._pins.values(), Counter()) and all(arena._pins.values())
    assert all(arena._key_at[place] in arena.index.resident for place in arena._pinned)
    held = {holder for session in space.sessions for holder in session._holders[space]}
    assert _engines_among(arena._pins) <= held


def _journal_says_the_same(arena, adoptions) -> None:
    keeper = arena.memory.keeper
    if keeper is None or keeper.journal._file is None:
        return
    kept = keeper.journal.spaces[keeper.space].slots
    condemned = {*arena._uncovered, *arena._overwritten}
    assert {slot: (held.key, held.tenant) for slot, held in kept.items() if slot not in condemned} == {
        slot: (key, arena._named_by[key]) for slot, key in arena._key_at.items()
    }
    assert condemned <= kept.keys()
    found = {slot for slot, key in arena._key_at.items() if arena.has(key)}
    ready = {slot for slot, held in kept.items() if held.ready}
    assert found <= ready
    adopting = {key for adoption in adoptions if adoption._arena is arena for key in adoption._parents}
    assert {arena._key_at[slot] for slot in ready - found} <= adopting
    _file_says_the_same(keeper.journal)


def _file_says_the_same(journal) -> None:
    spaces, journal.spaces = journal.spaces, {}
    try:
        journal._replay(_records((journal.path / "journal").read_bytes()), journal._inode)
        assert journal.spaces == spaces
    except JournalError as error:
        raise AssertionError(error) from error
    finally:
        journal.spaces = spaces


def _extents_belong_to_stacks(server: Server) -> None:
    for memory in server.spaces.memories:
        extents = memory.extents
        shares = [arena.memory for arena in server.spaces._stacks if arena.memory._extents is extents]
        assert extents._shares.keys() == {*shares, *(share for share, _ in memory.formers)}
        owned = Counter(owner for owner in extents._owners if owner is not None)
        assert owned == Counter({share: share.count for share in extents._shares if share.count})
        assert extents.free == extents._owners.count(None)
        models = Counter()
        for share in extents._shares:
            models[share.model] += share.count - len(share.leaving)
        assert +extents._of_model == +models
        for share in shares:
            used = {extent for slot in share._used for extent in share.extents_of(slot)}
            assert all(extents._owners[extent] is share for extent in used)
