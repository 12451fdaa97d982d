"""The laws of policies, token databases and serializers can fail, each where a bug is planted."""

from __future__ import annotations

import hashlib
import random
import struct
import time
import zlib
from typing import ClassVar

import attrs
import pytest

from kvtier_core import interfaces
from kvtier_core.errors import BackendError, ConfigError
from kvtier_testing import PolicyLaws, SerializerLaws, TokenDatabaseLaws
from kvtier_testing.samples import address_of


class Policy(interfaces.EvictionPolicy):
    """Correct: least recently used."""

    def __init__(self):
        self.order = {}

    def request(self, path, now, hints):
        for key in path:
            if key in self.order:
                self.order[key] = self.order.pop(key)

    def admit(self, key, nbytes):
        self.order[key] = nbytes

    def forget(self, key, *, evicted):
        del self.order[key]

    def victims(self):
        return iter(list(self.order))


class NamesTheDead(Policy):
    def forget(self, key, *, evicted):
        pass


class SparesTheNewest(Policy):
    def victims(self):
        return iter(list(self.order)[:-1])


class ForgetsWhomItNames(Policy):
    def victims(self):
        while self.order:
            key = next(iter(self.order))
            del self.order[key]
            yield key

    def forget(self, key, *, evicted):
        self.order.pop(key, None)


class Spares(Policy):
    """Correct, and able to spare."""

    def __init__(self):
        super().__init__()
        self.spared = {}

    def forget(self, key, *, evicted):
        del (self.spared if key in self.spared else self.order)[key]

    def spare(self, key):
        self.spared[key] = self.order.pop(key)

    def unspare(self, key):
        self.order[key] = self.spared.pop(key)


class NamesTheSpared(Spares):
    def victims(self):
        return iter([*self.order, *self.spared])


class SparesForGood(Spares):
    def unspare(self, key):
        pass


class TakesRequestsForTurns(Spares):
    def request(self, path, now, hints):
        self.order.update({key: self.spared[key] for key in path if key in self.spared})


class Shuffles(Policy):
    def __init__(self):
        super().__init__()
        self.rng = random.SystemRandom().randbytes(8)

    def victims(self):
        return iter(sorted(self.order, key=lambda key: hashlib.sha256(self.rng + key).digest()))


class RemembersAllGhosts(Policy):
    def __init__(self):
        super().__init__()
        self.ghosts = set()

    def forget(self, key, *, evicted):
        super().forget(key, evicted=evicted)
        self.ghosts.add(key)


class CannotBeLeft(Policy):
    """Is confused by an iterator that nobody finishes."""

    busy = False

    def victims(self):
        assert not self.busy
        self.busy = True
        yield from list(self.order)
        self.busy = False


class PrefersOnce(Policy):
    """Takes in on being asked."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def prefers(self, newcomer, victim):
        before = newcomer in self.asked
        self.asked.add(newcomer)
        return before


class ReordersOnBeingAsked(Policy):
    def prefers(self, newcomer, victim):
        self.order[victim] = self.order.pop(victim)
        return True


class SavesAll(Policy):
    def save(self):
        return bytes(1 << 20)


class SavesMoreAndMore(Policy):
    def save(self):
        return b"".join(self.order)


class ChokesOnGarbage(Policy):
    def save(self):
        return b"learned"

    def restore(self, saved):
        if saved != b"learned":
            raise ValueError(saved)


class BelievesGarbage(Policy):
    learned = bytes(8)

    def save(self):
        return self.learned

    def restore(self, saved):
        self.learned = saved[:8].ljust(8, b"!")


class IsUpsetByGarbage(Policy):
    """Saves nothing, and goes the other way round after a restore."""

    upset = False

    def restore(self, saved):
        self.upset = bool(saved)

    def victims(self):
        return iter(list(self.order)[::-1] if self.upset else list(self.order))


class FollowsASet(Policy):
    def victims(self):
        return iter(set(self.order))


class SearchesForEachVictim(Policy):
    def victims(self):
        place = {key: i for i, key in enumerate(self.order)}
        left = list(place)
        while left:
            key = min(left, key=place.__getitem__)
            left.remove(key)
            yield key


class SearchesInPlainPython(Policy):
    """Looks at no key, but at each number before it, in a loop."""

    def victims(self):
        for i, key in enumerate(list(self.order)):
            for _ in range(i):
                pass
            yield key


class SortsForTheFirstVictim(Policy):
    def victims(self):
        place = {key: i for i, key in enumerate(self.order)}
        return iter(sorted(self.order, key=place.__getitem__))


class NeverPrefers(Policy):
    def prefers(self, newcomer, victim):
        return False


@attrs.frozen
class PlantedPolicy(interfaces.EvictionConfig):
    type: ClassVar[str] = "planted"
    policy: type = Policy

    def open(self):
        return self.policy()


class Database(interfaces.TokenDatabase):
    """Correct: every digest covers the one before it."""

    def __init__(self, namespace, chunk_tokens):
        self.chunk_tokens = chunk_tokens
        self.root = namespace.digest

    def keys(self, tokens, *, known=(), salt=b"", extra=None):
        keys = list(known)
        for i in range(len(known), len(tokens) // self.chunk_tokens):
            before = keys[-1] if keys else self.first(salt)
            chunk = tokens[i * self.chunk_tokens : (i + 1) * self.chunk_tokens]
            keys.append(self.link(before, chunk, (extra or {}).get(i, b"")))
        return keys

    def first(self, salt):
        return hashlib.sha256(self.root + salt).digest()

    def link(self, before, chunk, extra):
        return hashlib.sha256(before + repr(list(chunk)).encode() + extra).digest()


class NamesTheRest(Database):
    def keys(self, tokens, **kwargs):
        return super().keys([*tokens, *[0] * (-len(tokens) % self.chunk_tokens)], **kwargs)


class CountsCalls(Database):
    calls = 0

    def first(self, salt):
        self.calls += 1
        return super().first(salt + bytes(self.calls))


class DependsOnTheLength(Database):
    def keys(self, tokens, **kwargs):
        self.root = bytes([len(tokens) % 256])
        return super().keys(tokens, **kwargs)


class DoesNotChain(Database):
    def link(self, before, chunk, extra):
        return super().link(self.root, chunk, extra)


class AddsUp(Database):
    def link(self, before, chunk, extra):
        return super().link(before, [sum(chunk)], extra)


class IgnoresSalt(Database):
    def first(self, salt):
        return super().first(b"")


class IgnoresExtra(Database):
    def link(self, before, chunk, extra):
        return super().link(before, chunk, b"")


class IgnoresNamespace(Database):
    def __init__(self, namespace, chunk_tokens):
        super().__init__(namespace, chunk_tokens)
        self.root = b""


class MixesSaltAndExtra(Database):
    def keys(self, tokens, *, known=(), salt=b"", extra=None):
        extra = extra or {}
        return super().keys(tokens, known=known, extra={**extra, 0: salt + extra.get(0, b"")})


class DropsKnown(Database):
    def keys(self, tokens, *, known=(), **kwargs):
        return super().keys(tokens, known=known, **kwargs)[len(known) :]


class UsesPythonsHash(Database):
    def link(self, before, chunk, extra):
        return super().link(before, chunk, str(hash(extra)).encode())


class CutsTokensTo16Bits(Database):
    def link(self, before, chunk, extra):
        return super().link(before, [token & 0xFFFF for token in chunk], extra)


class AppendsToKnown(Database):
    def keys(self, tokens, *, known=(), **kwargs):
        keys = super().keys(tokens, known=known, **kwargs)
        if isinstance(known, list):
            known[:] = keys
        return keys


class HandsOutItsOwnList(Database):
    def __init__(self, namespace, chunk_tokens):
        super().__init__(namespace, chunk_tokens)
        self.made = {}

    def keys(self, tokens, **kwargs):
        return self.made.setdefault((*tokens, repr(kwargs.get("extra"))), super().keys(tokens, **kwargs))


class HasChunksOf16(Database):
    def __init__(self, namespace, chunk_tokens):
        super().__init__(namespace, 16)


class NamesTheBeginningOfAPrompt(Database):
    """A digest token by token: where two chunks of different sizes end at the same token, they have one key."""

    def link(self, before, chunk, extra):
        for token in chunk:
            before = super().link(before, [token], b"")
        return super().link(before, [], extra) if extra else before


class CutsTheSalt(Database):
    def first(self, salt):
        return super().first(salt[:16])


class CutsExtra(Database):
    def link(self, before, chunk, extra):
        return super().link(before, chunk, extra[:16])


class TakesOneExtra(Database):
    def keys(self, tokens, *, extra=None, **kwargs):
        return super().keys(tokens, extra=dict(sorted((extra or {}).items())[:1]), **kwargs)


@attrs.frozen
class PlantedDatabase(interfaces.TokenDatabaseConfig):
    type: ClassVar[str] = "planted"
    database: type = Database

    def open(self, namespace, chunk_tokens):
        return self.database(namespace, chunk_tokens)


class Codec(interfaces.Serializer):
    """Correct: zlib."""

    level = 1

    def bound(self, layout):
        return layout.payload_nbytes + layout.payload_nbytes // 1000 + 64

    def encode(self, payload, into):
        encoded = zlib.compress(payload, self.level)
        into[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, encoded, into):
        try:
            payload = zlib.decompress(encoded)
        except zlib.error as error:
            raise BackendError(str(error)) from error
        if len(payload) > len(into):
            raise BackendError("longer than its payload")
        into[: len(payload)] = payload
        return len(payload)


class Stronger(Codec):
    level = 9


class UpperBytes(Codec):
    """Correct and lossy: of each two bytes the first is gone."""

    def encode(self, payload, into):
        return super().encode(bytes(payload[1::2]), into)

    def decode(self, encoded, into):
        upper = memoryview(bytearray(len(into) // 2))
        nbytes = super().decode(encoded, upper)
        into[1 : 2 * nbytes : 2] = upper[:nbytes]
        into[: 2 * nbytes : 2] = bytes(nbytes)
        return 2 * nbytes


class BoundIsNone(Codec):
    def bound(self, layout):
        return layout.payload_nbytes // 2


class ScribblesBehind(Codec):
    def encode(self, payload, into):
        nbytes = super().encode(payload, into)
        into[-1] = 0
        return nbytes


class LosesBits(Codec):
    def decode(self, encoded, into):
        nbytes = super().decode(encoded, into)
        into[7] &= 0xFE
        return nbytes


class MergesNans(Codec):
    """As arithmetic on bfloat16 does: every NaN becomes the one NaN."""

    def encode(self, payload, into):
        patterns = struct.unpack(f"<{len(payload) // 2}H", payload)
        merged = [0x7FC0 if each & 0x7F80 == 0x7F80 and each & 0x7F else each for each in patterns]
        return super().encode(struct.pack(f"<{len(merged)}H", *merged), into)


class ReturnsZeros(UpperBytes):
    def decode(self, encoded, into):
        into[:] = bytes(len(into))
        return len(into)


class SharesABuffer(Codec):
    """Among the threads that encode."""

    def __init__(self):
        self.buffer = bytearray()

    def encode(self, payload, into):
        self.buffer[:] = payload
        return super().encode(self.buffer, into)


class SharesABufferToDecode(Codec):
    """Among the threads that decode."""

    def __init__(self):
        self.buffer = bytearray()

    def decode(self, encoded, into):
        nbytes = super().decode(encoded, into)
        self.buffer[:] = into[:nbytes]
        time.sleep(0)
        into[:nbytes] = self.buffer
        return nbytes


class RemembersWhatItEncoded(Codec):
    """Decodes only in the instance that encoded."""

    def __init__(self):
        self.payloads = []

    def encode(self, payload, into):
        self.payloads.append(bytes(payload))
        into[:4] = struct.pack("<I", len(self.payloads) - 1)
        return 4

    def decode(self, encoded, into):
        try:
            payload = self.payloads[struct.unpack("<I", encoded)[0]]
        except (struct.error, IndexError) as error:
            raise BackendError(str(error)) from error
        into[: len(payload)] = payload
        return len(payload)


IN_THIS_PROCESS = []


class RemembersInItsProcess(RemembersWhatItEncoded):
    """Decodes only in the process that encoded."""

    def __init__(self):
        self.payloads = IN_THIS_PROCESS


class KeepsThePayload(Codec):
    def encode(self, payload, into):
        self.kept = payload[:]
        return super().encode(payload, into)


class AddsToWhatIsThere(Codec):
    """Takes it that ``into`` is new memory, full of zeros."""

    def encode(self, payload, into):
        encoded = zlib.compress(payload, self.level)
        for at, byte in enumerate(encoded):
            into[at] |= byte
        return len(encoded)


class NeedsAlignment(Codec):
    def encode(self, payload, into):
        if address_of(into) % 2:
            raise BackendError("not aligned")
        return super().encode(payload, into)


class KnowsOneLength(Codec):
    """Pads what it decodes to the length of a chunk with one part."""

    def bound(self, layout):
        self.nbytes = layout.payload_nbytes
        return super().bound(layout)

    def decode(self, encoded, into):
        super().decode(encoded, into)
        return self.nbytes if hasattr(self, "nbytes") else len(into)


class BelievesItsHeader(Codec):
    """Allocates as much as is said in front of the encoding, if the machine that runs this test has it."""

    def bound(self, layout):
        return super().bound(layout) + 8

    def encode(self, payload, into):
        struct.pack_into("<Q", into, 0, len(payload))
        return 8 + super().encode(payload, into[8:])

    def decode(self, encoded, into):
        try:
            (said,) = struct.unpack_from("<Q", encoded)
        except struct.error as error:
            raise BackendError(str(error)) from error
        if said > 64 << 20:
            raise BackendError("too long")
        payload = memoryview(bytearray(said))
        nbytes = super().decode(encoded[8:], payload)
        if nbytes > len(into):
            raise BackendError("longer than its payload")
        into[:nbytes] = payload[:nbytes]
        return nbytes


class Crashes(Codec):
    def decode(self, encoded, into):
        payload = zlib.decompress(encoded)
        into[:] = payload
        return len(payload)


@attrs.frozen
class PlantedSerializer(interfaces.SerializerConfig):
    type: ClassVar[str] = "planted"
    lossless: ClassVar[bool] = True
    codec: str = "Codec"

    def open(self, ctx):
        return globals()[self.codec]()

    def others(self):
        return [attrs.evolve(self, codec="Stronger")]

    def is_close(self, payload, decoded):
        return decoded[1::2] == payload[1::2]


class PlantedLossy(PlantedSerializer):
    lossless: ClassVar[bool] = False


class EverythingIsClose(PlantedLossy):
    def is_close(self, payload, decoded):
        return True


class PassesForRaw(PlantedSerializer):
    type: ClassVar[str] = "raw"


class DoesNotSayWhetherItLoses(PlantedSerializer):
    lossless: ClassVar[None] = None


class OpensNothing(PlantedSerializer):
    def open(self, ctx):
        return None


class HidesAnOption(PlantedSerializer):
    """What changes the encoding is no field."""

    level: ClassVar[int] = 1

    def open(self, ctx):
        codec = Codec()
        codec.level = self.level
        return codec

    def others(self):
        return [*super().others(), HidesAnOtherOption()]


class HidesAnOtherOption(HidesAnOption):
    level: ClassVar[int] = 9


class NamesNoOtherOptions(PlantedSerializer):
    def others(self):
        return []


class TestPolicy(PolicyLaws):
    planted = PlantedPolicy()

    def config(self, folder):
        return self.planted


class TestDatabase(TokenDatabaseLaws):
    planted = PlantedDatabase()

    def config(self, folder):
        return self.planted


class TestSerializer(SerializerLaws):
    planted = PlantedSerializer()

    def config(self, folder):
        return self.planted

    def others(self, folder):
        return self.planted.others()

    def is_close(self, payload, decoded):
        return self.planted.is_close(payload, decoded)


class TestLossySerializer(TestSerializer):
    planted = PlantedLossy("UpperBytes")


SPARED = "test_what_is_spared_is_no_victim_until_its_turn_comes_back"
SQUARE = "test_victims_take_no_quadratic_work"
BUGS = {
    TestPolicy: [
        (PlantedPolicy(NamesTheDead), "test_victims_are_the_held_keys_each_once"),
        (PlantedPolicy(SparesTheNewest), "test_victims_are_the_held_keys_each_once"),
        (PlantedPolicy(ForgetsWhomItNames), "test_asking_for_victims_changes_nothing"),
        (PlantedPolicy(NamesTheSpared), SPARED),
        (PlantedPolicy(SparesForGood), SPARED),
        (PlantedPolicy(TakesRequestsForTurns), SPARED),
        (PlantedPolicy(Shuffles), "test_the_same_history_has_the_same_victims"),
        (PlantedPolicy(CannotBeLeft), "test_victims_may_be_left_halfway"),
        (PlantedPolicy(PrefersOnce), "test_prefers_changes_nothing"),
        (PlantedPolicy(ReordersOnBeingAsked), "test_prefers_changes_nothing"),
        (PlantedPolicy(SavesAll), "test_saved_state_is_small_and_safe_to_restore"),
        (PlantedPolicy(SavesMoreAndMore), "test_saved_state_is_small_and_safe_to_restore"),
        (PlantedPolicy(ChokesOnGarbage), "test_saved_state_is_small_and_safe_to_restore"),
        (PlantedPolicy(BelievesGarbage), "test_garbage_teaches_nothing"),
        (PlantedPolicy(IsUpsetByGarbage), "test_garbage_teaches_nothing"),
        (PlantedPolicy(FollowsASet), "test_every_process_has_the_same_victims"),
        (PlantedPolicy(SearchesForEachVictim), SQUARE),
        (PlantedPolicy(SearchesInPlainPython), SQUARE),
        (PlantedPolicy(SortsForTheFirstVictim), SQUARE),
        (PlantedPolicy(NeverPrefers), "test_a_full_tier_does_not_stay_closed"),
        (PlantedPolicy(RemembersAllGhosts), "test_memory_is_bounded"),
    ],
    TestDatabase: [
        (PlantedDatabase(NamesTheRest), "test_one_key_of_32_bytes_per_full_chunk"),
        (PlantedDatabase(CountsCalls), "test_deterministic"),
        (PlantedDatabase(DependsOnTheLength), "test_a_prefix_has_the_prefix_of_the_keys"),
        (PlantedDatabase(DoesNotChain), "test_a_token_changes_its_key_and_all_that_follow"),
        (PlantedDatabase(AddsUp), "test_swapped_tokens_are_other_tokens"),
        (PlantedDatabase(IgnoresSalt), "test_salts_share_nothing"),
        (PlantedDatabase(IgnoresNamespace), "test_namespaces_share_nothing"),
        (PlantedDatabase(IgnoresExtra), "test_extra_changes_its_chunk_and_all_that_follow"),
        (PlantedDatabase(MixesSaltAndExtra), "test_salt_and_extra_are_not_confused"),
        (PlantedDatabase(CutsTokensTo16Bits), "test_every_bit_of_a_token_counts"),
        (PlantedDatabase(AppendsToKnown), "test_arguments_stay_as_they_are"),
        (PlantedDatabase(HandsOutItsOwnList), "test_arguments_stay_as_they_are"),
        (PlantedDatabase(HasChunksOf16), "test_chunk_sizes_share_nothing"),
        (PlantedDatabase(NamesTheBeginningOfAPrompt), "test_chunk_sizes_share_nothing"),
        (PlantedDatabase(CutsTheSalt), "test_salts_share_nothing"),
        (PlantedDatabase(CutsExtra), "test_extra_changes_its_chunk_and_all_that_follow"),
        (PlantedDatabase(TakesOneExtra), "test_extra_changes_its_chunk_and_all_that_follow"),
        (PlantedDatabase(DropsKnown), "test_known_keys_change_nothing"),
        (PlantedDatabase(UsesPythonsHash), "test_every_process_has_the_same_keys"),
    ],
    TestSerializer: [
        (PassesForRaw(), "test_the_codec_is_named"),
        (DoesNotSayWhetherItLoses(), "test_the_codec_is_named"),
        (OpensNothing(), "test_a_payload_comes_back_in_full"),
        (HidesAnOption(), "test_other_options_are_another_codec"),
        (NamesNoOtherOptions(), "test_other_options_are_another_codec"),
        (PlantedSerializer("BoundIsNone"), "test_the_bound_is_a_bound"),
        (PlantedSerializer("ScribblesBehind"), "test_the_bound_is_a_bound"),
        (PlantedSerializer("LosesBits"), "test_a_payload_comes_back_in_full"),
        (PlantedSerializer("UpperBytes"), "test_a_payload_comes_back_in_full"),
        (PlantedSerializer("MergesNans"), "test_a_payload_comes_back_in_full"),
        (PlantedLossy("ReturnsZeros"), "test_a_payload_comes_back_in_full"),
        (EverythingIsClose("ReturnsZeros"), "test_an_error_that_is_stated_tells_payloads_apart"),
        (PlantedSerializer("SharesABuffer"), "test_one_instance_serves_several_threads"),
        (PlantedSerializer("SharesABufferToDecode"), "test_one_instance_serves_several_threads"),
        (PlantedSerializer("RemembersWhatItEncoded"), "test_any_instance_decodes"),
        (PlantedSerializer("RemembersInItsProcess"), "test_any_process_decodes"),
        (PlantedSerializer("KeepsThePayload"), "test_no_view_is_kept"),
        (PlantedSerializer("AddsToWhatIsThere"), "test_views_begin_anywhere_and_hold_anything"),
        (PlantedSerializer("NeedsAlignment"), "test_views_begin_anywhere_and_hold_anything"),
        (PlantedSerializer("KnowsOneLength"), "test_every_part_of_a_chunk_comes_back"),
        (PlantedSerializer("BelievesItsHeader"), "test_garbage_takes_little_memory"),
        (PlantedSerializer("Crashes"), "test_garbage_does_no_harm"),
    ],
}


CASES = [(suite, planted, law) for suite, bugs in BUGS.items() for planted, law in bugs]


@pytest.mark.parametrize(("suite", "planted", "law"), CASES)
def test_a_planted_bug_breaks_its_law(tmp_path, monkeypatch, suite, planted, law):
    monkeypatch.setattr(suite, "planted", planted)
    more = {
        "test_known_keys_change_nothing": {"extra": None},
        "test_garbage_does_no_harm": {"seed": 0},
    }
    with pytest.raises((AssertionError, BackendError, BufferError, ConfigError, ValueError, zlib.error)):
        getattr(suite(), law)(tmp_path, **more.get(law, {}))
