"""Frames travel from a tier into a bundle, and from there to engines and into other tiers."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from bundles import TOKENS, context, fill, found, keys_of, opened, parts_of, run, write_file
from servers import s3
from servers.redis import one_server
from sizes import some

from kvtier_bundle.forms import engines_namespace
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_testing.samples import make_group, make_keys, make_layout

KEYS = make_keys(6)
SECRET = "0f8a6c5be97d2413a0c4e1d8f27b95634e"
DISK = "type: disk, capacity: 64MiB, path: {}"
BUNDLE = "type: bundle, path: prompts.kvbundle"
WINDOW = make_group((2048,), name="group 1", kind=KVKind.SLIDING_WINDOW, reach=32)
LAYOUTS = {
    "plain": make_layout(),
    "ranks": make_layout(ranks=2, page_nbytes=(4608, 1536)),
    "hybrid": ChunkLayout([make_group((4608, 1536)), WINDOW], TOKENS),
    "packed": attrs.evolve(make_layout(), packed=True),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIER_SEAL", SECRET)
    monkeypatch.setenv("KVTIER_OTHER", SECRET[::-1])
    return tmp_path


SERIALIZERS = ["", "serializer: zstd", "serializer: packed"]
SEALS = ["", "seal_key: env:KVTIER_SEAL", "seal_key: env:KVTIER_SEAL, encrypt: true"]
FORMS = [
    (form, is_shared)
    for form in [", ".join(filter(None, (one, other))) for one in SERIALIZERS for other in SEALS]
    for is_shared in (False, True)
    if is_shared or not ("serializer" in form and "seal_key" in form)
]


def with_(tier: str, *further: str) -> str:
    return ", ".join([tier, *filter(None, further)])


def shared(tier: str, is_shared: bool) -> str:
    return tier.replace(", capacity: 64MiB", "") + ", shared: true" if is_shared else tier


@pytest.mark.parametrize(
    ("form", "is_shared", "layout"),
    [
        (form, is_shared, layout)
        for form, is_shared in FORMS
        for layout in LAYOUTS
        if layout != "packed" or "serializer" not in form
    ],
)
def test_a_bundle_serves_what_a_tier_held_and_another_tier_gets_it(form, is_shared, layout):
    ctx, salt = context(LAYOUTS[layout]), b"a salt" if "encrypt" in form else b""
    source = write_file("source.yaml", with_(shared(DISK.format("one"), is_shared), form))
    fill(source, ctx, KEYS, salt)
    assert run("export", "disk", "prompts.kvbundle", "--config", source) == 0
    expected = parts_of(KEYS, ctx.layout)
    with opened(write_file("reader.yaml", with_(BUNDLE, form)), ctx) as tier:
        assert found(tier, ctx, KEYS, salt) == expected
        assert all(tier.store.contains(expected))
    target = write_file("target.yaml", with_(shared(DISK.format("two"), is_shared), form))
    assert run("import", "prompts.kvbundle", "disk", "--config", target) == 0
    with opened(target, ctx) as tier:
        assert found(tier, ctx, KEYS, salt) == expected


@pytest.mark.parametrize(("form", "is_shared"), FORMS)
def test_prompts_are_named_in_the_namespace_of_the_engine(form, is_shared):
    source = write_file("source.yaml", with_(shared(DISK.format("one"), is_shared), form))
    for layout in (*LAYOUTS.values(), attrs.evolve(make_layout(), any_ranks=True)):
        ctx = context(layout)
        with opened(source, ctx) as tier:
            assert engines_namespace(tier.codec.namespace) == ctx.namespace


STORES = ["gds", "redis", "s3"]


@pytest.fixture(params=some(STORES))
def store(request, tmp_path):
    """The settings of a tier of each other type that can be exported."""
    if request.param == "gds":
        yield "type: gds, capacity: 8MiB, paths: [slab]"
    elif request.param == "redis":
        with one_server(tmp_path / "redis") as server:
            yield f"type: redis, url: '{server.url}'"
    else:
        with s3.environment(), contextlib.closing(s3.S3Server()) as server:
            yield f"type: s3, bucket: {s3.BUCKET}, endpoint: '{server.url}', region: us-east-1"


def test_each_store_gives_and_takes_bundles(store):
    ctx = exported(KEYS)
    name, file = store.split(",")[0].removeprefix("type: "), write_file("store.yaml", store)
    assert run("import", "prompts.kvbundle", name, "--config", file) == 0
    with opened(file, ctx) as tier:
        assert found(tier, ctx, KEYS) == KEYS
    assert run("export", name, "again.kvbundle", "--config", file) == 0
    with opened(write_file("reader.yaml", BUNDLE.replace("prompts", "again")), ctx) as tier:
        assert found(tier, ctx, KEYS) == KEYS


def test_fsck_verifies_a_bundle(capsys):
    exported(KEYS)
    reader = write_file("reader.yaml", BUNDLE)
    assert run("fsck", "bundle", "--config", reader) == 0
    assert re.search(f"^whole +{len(KEYS)} ", capsys.readouterr().out, re.MULTILINE)
    damage("prompts.kvbundle", 4096 + 4096 + 10)
    assert run("fsck", "bundle", "--config", reader) == 1
    assert "prompts.kvbundle: at 4096: the checksum does not match" in capsys.readouterr().out
    assert run("fsck", "bundle", "--config", reader, "--repair") == 1
    assert "a bundle is not changed" in capsys.readouterr().err


def exported(keys, ctx=None):
    """Export chunks with these keys from a disk."""
    ctx = ctx or context()
    source = write_file("source.yaml", DISK.format("one"))
    fill(source, ctx, keys)
    assert run("export", "disk", "prompts.kvbundle", "--config", source) == 0
    return ctx


def damage(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_engines_with_other_facts_find_nothing_and_learn_which_fact_differs():
    exported(KEYS)
    other = context(model="other")
    with opened(write_file("reader.yaml", BUNDLE), other) as tier:
        assert found(tier, other, KEYS) == []
        (there,) = tier.store.namespaces()
        assert other.namespace.differences(there) == [("model", "other", "tiny")]


def test_a_bundle_of_other_weights_is_not_imported(capsys):
    exported(KEYS)
    target, other = write_file("target.yaml", DISK.format("two")), context(model="other")
    fill(target, other, KEYS[:1])
    before = everything("two")
    assert run("import", "prompts.kvbundle", "disk", "--config", target) == 2
    assert "none of the bundle's namespace: model tiny instead of other; pass --new" in capsys.readouterr().err
    assert everything("two") == before
    assert run("import", "prompts.kvbundle", "disk", "--config", target, "--new") == 0
    with opened(target, context()) as tier:
        assert found(tier, context(), KEYS) == KEYS


def everything(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (with_(DISK.format("two"), "serializer: zstd"), "the codec of its frames is "),
        (with_(DISK.format("two"), "seal_key: env:KVTIER_SEAL"), "the seal of its frames is authenticated "),
    ],
)
def test_a_tier_of_another_form_refuses_a_bundle_before_anything_is_made(target, told, capsys, folder):
    exported(KEYS)
    assert run("import", "prompts.kvbundle", "disk", "--config", write_file("target.yaml", target)) == 2
    assert told in capsys.readouterr().err
    assert not (folder / "two").exists()


def test_a_sealed_bundle_is_of_one_key():
    ctx, form = context(), "seal_key: env:KVTIER_SEAL"
    source = write_file("source.yaml", with_(DISK.format("one"), form))
    fill(source, ctx, KEYS)
    assert run("export", "disk", "prompts.kvbundle", "--config", source) == 0
    with opened(write_file("reader.yaml", with_(BUNDLE, "seal_key: env:KVTIER_OTHER")), ctx) as tier:
        assert found(tier, ctx, KEYS) == []


@pytest.mark.parametrize("sized", [True, False], ids=["chunk_tokens", "auto"])
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_only_the_chunks_of_named_prompts_leave(sized, salt, capsys, monkeypatch, folder):
    monkeypatch.setenv("TENANT", "tenant")
    ctx = context()
    source = write_file("source.yaml", DISK.format("one"))
    prompts = [[*range(5 * TOKENS + 9)], [*range(3 * TOKENS), *range(100, 100 + 2 * TOKENS)]]
    paths = [keys_of(source, tokens, ctx, salt) for tokens in prompts]
    fill(source, ctx, [*KEYS, *paths[0][:4], *paths[1]])
    (folder / "0.json").write_text(json.dumps(prompts[0]))
    (folder / "1.json").write_text(json.dumps({"count": len(prompts[1]), "tokens": prompts[1]}))  # of /tokenize
    if not sized:
        (folder / "source.yaml").write_text(
            (folder / "source.yaml").read_text().replace(f"chunk_tokens: {TOKENS}\n", "")
        )
    files = ["--prompt", "0.json", "--prompt", "1.json", *(["--cache-salt", "env:TENANT"] if salt else [])]
    assert run("export", "disk", "prompts.kvbundle", "--config", source, *files) == 0
    assert "0.json: 4 of 5 chunks\n1.json: 5 of 5 chunks\n" in capsys.readouterr().out
    with opened(write_file("reader.yaml", BUNDLE), ctx) as tier:
        wanted = {*paths[0][:4], *paths[1]}
        assert set(found(tier, ctx, [*KEYS, *paths[0], *paths[1]])) == wanted
    (folder / "2.json").write_text(json.dumps([7] * 99))
    assert run("export", "disk", "none.kvbundle", "--config", source, "--prompt", "2.json") == 2
    assert "2.json: the tier has no chunk of this prompt" in capsys.readouterr().err
    assert not [*folder.glob("none.*")]


def test_a_namespace_is_chosen_by_its_first_digits(capsys):
    source, contexts = write_file("source.yaml", DISK.format("one")), [context(), context(model="other")]
    for number, ctx in enumerate(contexts):
        fill(source, ctx, KEYS[number : number + 3])
    assert run("export", "disk", "prompts.kvbundle", "--config", source) == 2
    told = capsys.readouterr().err
    assert "has several namespaces; choose one with --namespace: " in told and "model other" in told
    digits = contexts[1].namespace.digest.hex()[:12]
    assert run("export", "disk", "prompts.kvbundle", "--config", source, "--namespace", digits) == 0
    with opened(write_file("reader.yaml", BUNDLE), contexts[1]) as tier:
        assert found(tier, contexts[1], KEYS) == KEYS[1:4]


def test_damaged_frames_do_not_leave_and_are_told(capsys, folder):
    source = write_file("source.yaml", DISK.format("one"))
    fill(source, context(), KEYS)
    (file,) = folder.rglob(f"{KEYS[2].hex()}.kv")
    damage(file, 5000)
    assert run("export", "disk", "prompts.kvbundle", "--config", source) == 1
    told = capsys.readouterr()
    assert f"{KEYS[2].hex()}.kv: the checksum does not match" in told.err and "5 frames" in told.out


def test_a_frame_that_was_written_again_leaves_whole(folder):
    """The damaged one is kept in quarantine, under the same name."""
    ctx, source = context(), write_file("source.yaml", DISK.format("one"))
    fill(source, ctx, KEYS)
    with opened(source, ctx) as tier:
        (file,) = folder.rglob(f"{KEYS[2].hex()}.kv")
        damage(file, 5000)
        tier.store.quarantine(KEYS[2:3])
    fill(source, ctx, KEYS[2:3])
    assert len([*folder.rglob(f"*{KEYS[2].hex()}*")]) == 2
    assert run("export", "disk", "prompts.kvbundle", "--config", source) == 0
    with opened(write_file("reader.yaml", BUNDLE), ctx) as tier:
        assert found(tier, ctx, KEYS) == KEYS


def test_an_interrupted_export_continues_where_it_was(folder):
    ctx = exported(KEYS)
    whole = (folder / "prompts.kvbundle").read_bytes()
    frame = ctx.layout.frame_nbytes
    for cut in (4096, 4096 + frame, 4096 + 2 * frame + 5000, len(whole) - 3, len(whole)):
        (folder / "again.kvbundle.part").write_bytes(whole[:cut])
        os.chmod(folder / "again.kvbundle.part", 0o600)
        assert run("export", "disk", "again.kvbundle", "--config", "source.yaml") == 0
        assert (folder / "again.kvbundle").read_bytes()[: len(whole)].startswith(whole[: min(cut, 4096 + 2 * frame)])
        with opened(write_file("reader.yaml", BUNDLE.replace("prompts", "again")), ctx) as tier:
            assert found(tier, ctx, KEYS) == KEYS
        assert not (folder / "again.kvbundle.part").exists()


@pytest.mark.parametrize("erased", [True, False])
def test_an_interrupted_export_leaves_nothing_that_is_not_asked_for_now(folder, capsys, erased):
    ctx = context()
    source = write_file("source.yaml", DISK.format("one"))
    path = keys_of(source, [*range(4 * TOKENS)], ctx)
    fill(source, ctx, [*KEYS, *path])
    assert run("export", "disk", "all.kvbundle", "--config", source) == 0
    (folder / "all.kvbundle").rename(folder / "some.kvbundle.part")
    options = []
    if erased:
        with opened(source, ctx) as tier:
            tier.store.erase(KEYS)
    else:
        (folder / "prompt.json").write_text(json.dumps([*range(4 * TOKENS)]))
        options = ["--prompt", "prompt.json"]
    assert run("export", "disk", "some.kvbundle", "--config", source, *options) == 0
    with opened(write_file("reader.yaml", BUNDLE.replace("prompts", "some")), ctx) as tier:
        assert found(tier, ctx, [*KEYS, *path]) == path
        assert (folder / "some.kvbundle").stat().st_size < 4096 + 5 * ctx.layout.frame_nbytes


@pytest.mark.parametrize("content", [b"something else", b"kvbundle"])
def test_what_is_no_interrupted_export_is_left_alone(folder, capsys, content):
    source = write_file("source.yaml", DISK.format("one"))
    fill(source, context(), KEYS)
    part = folder / "prompts.kvbundle.part"
    part.write_bytes(content)
    os.chmod(part, 0o600)
    assert run("export", "disk", "prompts.kvbundle", "--config", source) == 2
    assert part.read_bytes() == content


def test_an_interrupted_import_is_repeated_and_capacity_is_kept(folder, capsys):
    ctx = exported(KEYS)
    frame = ctx.layout.frame_nbytes
    small = write_file("small.yaml", DISK.format("two").replace("64MiB", f"{3 * frame + 5}B"))
    assert run("import", "prompts.kvbundle", "disk", "--config", small) == 2
    assert "no room after 3 frames" in capsys.readouterr().err
    large = write_file("large.yaml", DISK.format("two"))
    assert run("import", "prompts.kvbundle", "disk", "--config", large) == 0
    assert "disk: 3 frames, " in (told := capsys.readouterr().out) and "3 were there already" in told
    with opened(large, ctx) as tier:
        assert found(tier, ctx, KEYS) == KEYS


def test_a_bundle_passes_through_pipes(folder):
    ctx = context()
    source, target = write_file("source.yaml", DISK.format("one")), write_file("target.yaml", DISK.format("two"))
    fill(source, ctx, KEYS)
    kvtier = f"{sys.executable} -c 'import sys; from kvtier_core.cli import main; sys.exit(main())'"
    pipe = f"{kvtier} export disk - --config {source} | {kvtier} import - disk --config {target}"
    told = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    with opened(target, ctx) as tier:
        assert found(tier, ctx, KEYS) == KEYS


def test_a_copy_that_ends_early_is_imported_as_far_as_it_goes_and_told(folder, capsys):
    ctx = exported(KEYS)
    frame, target = ctx.layout.frame_nbytes, write_file("target.yaml", DISK.format("two"))
    whole = (folder / "prompts.kvbundle").read_bytes()
    (folder / "prompts.kvbundle").write_bytes(whole[: 4096 + 4 * frame + 100])
    assert run("import", "prompts.kvbundle", "disk", "--config", target) == 2
    assert "damaged or incomplete after 4 frames" in capsys.readouterr().err
    with opened(target, ctx) as tier:
        assert len(found(tier, ctx, KEYS)) == 4


@pytest.mark.parametrize("mode", [0o602, 0o620])
def test_what_others_can_write_is_not_read(mode, folder, capsys):
    ctx = exported(KEYS)
    reader, target = write_file("reader.yaml", BUNDLE), write_file("target.yaml", DISK.format("two"))
    with opened(reader, ctx) as tier:
        os.chmod("prompts.kvbundle", mode)
        assert found(tier, ctx, KEYS) == [], "it was opened before"
        os.chmod("prompts.kvbundle", 0o644)
        assert found(tier, ctx, KEYS) == [], "others may still have it open"
    os.chmod("prompts.kvbundle", mode)
    assert run("check", reader, "--open") == 1
    assert "others can write to it; run chmod go-w" in capsys.readouterr().err
    assert run("import", "prompts.kvbundle", "disk", "--config", target) == 2
    assert "others can write to it; run chmod go-w" in capsys.readouterr().err


def test_a_pipe_in_place_of_a_bundle_is_no_file(folder, capsys):
    os.mkfifo("prompts.kvbundle", 0o600)
    assert run("check", write_file("reader.yaml", BUNDLE), "--open") == 1
    assert "not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["somewhere"], "somewhere: a folder; name a file"),
        (["missing/prompts.kvbundle"], "missing/prompts.kvbundle.part: No such file or directory"),
        (["prompts.kvbundle", "--namespace", "ff00"], "disk has no such namespace; choose one with --namespace: "),
    ],
)
def test_an_export_that_cannot_be_made_leaves_nothing(options, told, folder, capsys):
    (folder / "somewhere").mkdir()
    fill(source := write_file("source.yaml", DISK.format("one")), context(), KEYS)
    before = {*folder.iterdir()}
    assert run("export", "disk", *options, "--config", source) == 2
    assert told in capsys.readouterr().err and {*folder.iterdir()} == before


def test_an_empty_tier_has_nothing_to_export(capsys, folder):
    assert run("export", "disk", "prompts.kvbundle", "--config", write_file("source.yaml", DISK.format("one"))) == 2
    assert "disk has no frames that an engine could use" in capsys.readouterr().err
    assert [*folder.iterdir()] == [folder / "source.yaml"]


def test_nothing_clears_a_bundle(capsys):
    exported(KEYS)
    assert run("clear", write_file("reader.yaml", BUNDLE), "--yes", "--shared") == 2
    assert "no tier below its arenas to clear; it has: none" in capsys.readouterr().err


def test_a_bundle_can_be_exported_again():
    ctx = exported(KEYS)
    assert run("export", "bundle", "again.kvbundle", "--config", write_file("reader.yaml", BUNDLE)) == 0
    assert Path("again.kvbundle").read_bytes() == Path("prompts.kvbundle").read_bytes()
    with opened("reader.yaml", ctx) as tier:
        digits = ctx.namespace.digest.hex()[:16]
        assert tier.store.facts() == {"frames": str(len(KEYS)), "namespace": digits}


def test_a_write_budget_of_a_bundle_is_refused(capsys):
    exported(KEYS)
    reader = write_file("reader.yaml", with_(BUNDLE, "writes: {per_day: 1TiB}"))
    assert run("check", reader) == 1
    assert "$.tiers[1].writes: nothing is written to this tier; remove it" in capsys.readouterr().err
