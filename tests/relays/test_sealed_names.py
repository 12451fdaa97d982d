"""A tier with a ``seal_key`` lets nobody confirm a guess of a prompt: no store sees the key of a chunk."""

from __future__ import annotations

import re

import boto3
import pytest
from sealing import AES, MAC, OTHER_SECRET, SEALS, SECRET
from serializing import XorConfig
from servers.redis import one_server
from servers.s3 import BUCKET, s3_server  # noqa: F401 - a fixture
from serving import FRAME, Serving, files

import kvtier_cpu.plugin
import kvtier_disk.plugin
import kvtier_gds.plugin
import kvtier_redis.plugin
import kvtier_s3.plugin
from kvtier_core.builtin.chained import Chained
from kvtier_core.cli import main
from kvtier_core.config.registry import Registry
from kvtier_core.encoding.keyed_seal import KeyedSeal
from kvtier_core.hookspecs import hookimpl
from kvtier_core.layouts import number_of_part, part_key
from kvtier_core.types import KEY_NBYTES
from kvtier_testing.samples import make_keys, make_namespace

CHUNK = 16
PINS = range(10000)
PIN = 4711
SEALED = 'seal_key: "env:KVTIER_TEST_SEAL"'
STORES = pytest.mark.parametrize("store", ["disk", "shared disk", "gds", "redis", "s3"])


def key_of_prompt(pin):
    """All but four digits of the prompt is known, and the facts of the namespace lie in the store."""
    tokens = [*range(CHUNK - 4), *map(int, f"{pin:04}")]
    return Chained(make_namespace(), CHUNK).keys(tokens)[0]


KEYS = {pin: key_of_prompt(pin) for pin in PINS}


def confirmed(seen):
    """The PINs whose key is anywhere in ``seen``, or the digits of its first half."""
    windows = {page[at : at + 16] for page in seen for at in range(len(page) - 15)}
    return [pin for pin, key in KEYS.items() if key[:16] in windows or key.hex()[:16].encode() in windows]


class Serializers:
    @hookimpl
    @staticmethod
    def kvtier_serializers():
        return [XorConfig]


class Folder:
    """A store in files."""

    def __init__(self, tmp_path, tier):
        self.path, self.tier = tmp_path / "store", tier

    def seen(self):
        """All names and all pages that are not empty."""
        found = [str(file.relative_to(self.path)).encode() for file in self.path.rglob("*")]
        for file in self.path.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    found += [page for page in iter(lambda opened=opened: opened.read(4096), b"") if any(page)]
        return found


class Redis:
    """A store on a server."""

    def __init__(self, server):
        self.server, self.tier = server, f"type: redis, url: {server.url}, capacity: {128 * FRAME}B"

    def seen(self):
        """All names and values."""
        names = self.server.ask("KEYS", "*")
        ask = {"string": ["GET"], "hash": ["HGETALL"], "zset": ["ZRANGE", "0", "-1"], "set": ["SMEMBERS"]}
        found = list(names)
        for name in names:
            how, *more = ask[self.server.ask("TYPE", name)]
            value = self.server.ask(how, name, *more)
            found += value if isinstance(value, list) else [value]
        return [str(each).encode(errors="surrogateescape") for each in found]


class Bucket:
    """A store in a folder of a bucket."""

    def __init__(self, server, prefix):
        self.url, self.prefix = server.url, prefix
        self.tier = f"type: s3, bucket: {BUCKET}, prefix: {prefix}, endpoint: '{server.url}', capacity: {128 * FRAME}B"

    def seen(self):
        """All names, contents and headers."""
        client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1")
        found = []
        for listed in client.list_objects_v2(Bucket=BUCKET, Prefix=self.prefix)["Contents"]:
            stored = client.get_object(Bucket=BUCKET, Key=listed["Key"])
            found += [listed["Key"].encode(), str(stored["ResponseMetadata"]).encode(), stored["Body"].read()]
        return found


@pytest.fixture
def place(store, tmp_path, request):
    if store == "s3":
        yield Bucket(request.getfixturevalue("s3_server"), tmp_path.name)
        return
    if store == "redis":
        with one_server(tmp_path / "server") as server:
            yield Redis(server)
        return
    path, capacity = tmp_path / "store", f"capacity: {128 * FRAME}B"
    yield Folder(
        tmp_path,
        {
            "disk": f"type: disk, path: {path}, min_free: 0B, {capacity}",
            "shared disk": f"type: disk, path: {path}, shared: true, min_free: 0B, {capacity}",
            "gds": f"type: gds, paths: [{path}], mode: bounce, {capacity}",
        }[store],
    )


@pytest.fixture
def engine(tmp_path, monkeypatch, place):
    """``engine(settings)`` is a new one over the same store."""
    monkeypatch.setenv("KVTIER_TEST_SEAL", SECRET)
    monkeypatch.setenv("KVTIER_TEST_OTHER", OTHER_SECRET)

    def start(settings):
        file = tmp_path / "kvtier.yaml"
        head = f"version: 1\nload: always\ntiers:\n  - {{type: cpu, capacity: {8 * FRAME}B}}\n"
        file.write_text(f"{head}  - {{{', '.join(filter(None, [place.tier, settings]))}}}\n")
        return Serving(file, kvtier_gds.plugin, kvtier_redis.plugin, kvtier_s3.plugin, Serializers)

    return start


def asked(serving, *pins):
    with serving:
        return [serving.ask([KEYS[pin]]) for pin in pins]


@STORES
@pytest.mark.parametrize(
    ("settings", "shown"), [("", [PIN]), (SEALED, []), (f"{SEALED}, encrypt: true", [])], ids=["plain", "mac", "aes"]
)
def test_a_guessed_prompt_is_confirmed_by_no_name_and_no_header(engine, place, settings, shown):
    assert asked(engine(settings), PIN) == [0]
    assert confirmed(place.seen()) == shown
    assert asked(engine(settings), PIN) == [1], "the engine finds it after a restart"
    assert confirmed(place.seen()) == shown


@pytest.mark.parametrize("store", ["disk"])
def test_a_damaged_frame_is_kept_aside_under_its_sealed_name(engine, place):
    asked(engine(SEALED), PIN)
    (frame,) = [file for file in files(place.path) if file.stat().st_size == FRAME]
    frame.write_bytes(frame.read_bytes()[:-1] + b"?")
    with engine(SEALED) as serving:
        assert serving.ask([KEYS[PIN]]) == 0
    assert frame.name.removesuffix(".kv") in "".join(file.name for file in (place.path / "quarantine").iterdir())
    assert confirmed(place.seen()) == []


@STORES
def test_frames_of_another_key_or_of_none_are_misses_and_stay(engine, place):
    other = SEALED.replace("SEAL", "OTHER")
    for settings in ("", SEALED, f"{SEALED}, encrypt: true", other):
        assert asked(engine(settings), PIN) == [0]
    for settings in ("", SEALED, f"{SEALED}, encrypt: true", other):
        assert asked(engine(settings), PIN) == [1]


@STORES
@pytest.mark.parametrize("secret", [SECRET, ""], ids=["with the secret", "without it"])
def test_fsck_finds_every_frame_whole(engine, store, secret, tmp_path, monkeypatch, capsys):
    asked(engine(SEALED), *range(8))
    monkeypatch.setenv("KVTIER_TEST_SEAL", secret)
    assert main(["fsck", store.split()[-1], "--config", str(tmp_path / "kvtier.yaml"), "--repair"]) == 0
    frames = 8 + (store in ("disk", "gds") and not secret)  # without it, what the policy learned looks like a frame
    assert re.search(rf"^whole +{frames} ", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("KVTIER_TEST_SEAL", SECRET)
    assert asked(engine(SEALED), *range(8)) == [1] * 8


@pytest.mark.parametrize("store", ["disk"])
@pytest.mark.parametrize("secret", [SECRET, ""], ids=["with the secret", "without it"])
def test_fsck_expects_no_codec_of_what_a_policy_learned(engine, secret, tmp_path, monkeypatch, capsys):
    asked(engine(f"{SEALED}, serializer: xor"), PIN, PIN)  # asked for again: it learns
    monkeypatch.setenv("KVTIER_TEST_SEAL", secret)
    registry = Registry.of(kvtier_cpu.plugin, kvtier_disk.plugin, Serializers)
    monkeypatch.setattr("kvtier_doctor.stores.Registry.discover", lambda: registry)
    assert main(["fsck", "disk", "--config", str(tmp_path / "kvtier.yaml")]) == 0
    assert re.search(rf"^whole +{1 if secret else 2} ", capsys.readouterr().out, re.MULTILINE)


# -- names ---------------------------------------------------------------------------------------------


@SEALS
def test_a_name_stands_for_one_key_alone(keyed):
    keys = make_keys(300)
    names = keyed.names(keys)
    assert keyed.keys(names) == keys
    assert [keyed.names([key])[0] for key in keys] == names, "in a batch as alone"
    assert {len(name) for name in names} == {KEY_NBYTES} and len({*names, *keys}) == 600
    assert keyed.names([]) == keyed.keys([]) == []


def test_releases_agree_on_names():
    """An engine of another release finds the same frames. When names still were keys the id was another."""
    key = bytes(range(KEY_NBYTES))
    assert MAC.names([key])[0].hex() == "4ff9f002ffa34dfce6d256fe4bc15eb8089fdda0368bc351e89f5ae03a839c75"
    assert AES.names([key])[0].hex() == "c8b1fbd5e0d5afab71bea39efdd37a53c78236fdaf798d9b88b623dcfeadadc4"
    assert {each.identity.key_id.hex() for each in (MAC, AES)} == {"dfdb15d9cd3cc0c7d1e9bdb5a07a891b"}
    assert MAC.identity.key_id.hex() != "e273eec8791c79ed89c13220b4264d49"


def test_names_depend_on_the_secret_and_on_what_it_protects_from():
    (key,) = make_keys(1)
    keyed = [MAC, AES, KeyedSeal.of(OTHER_SECRET, encrypt=True)]
    assert len({seal.names([key])[0] for seal in keyed}) == 3
    assert MAC.names([key]) == KeyedSeal.of(SECRET, encrypt=False).names([key])


@SEALS
def test_the_parts_of_a_chunk_have_names_without_a_common_half(keyed):
    """The last byte of a key is the number of the part, and comes back."""
    (key,) = make_keys(1)
    parts = [part_key(key, number) for number in range(4)]
    names = keyed.names(parts)
    assert [number_of_part(each) for each in keyed.keys(names)] == [0, 1, 2, 3]
    assert len({name[half] for name in names for half in (slice(16), slice(16, 32))}) == 8
