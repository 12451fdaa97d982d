"""The digest of the weights: any change to any file of them is another digest."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import types

import pytest
import torch
from opened import kubelet_opens
from patience import HANG
from real_engines import cpu_and_disk, prompt
from safetensors.torch import load_file, save_file
from vllm.config import LoadConfig

from kvtier_core.config.model import IdentityConfig
from kvtier_core.identity import digest_cache, weights
from kvtier_core.identity.digest_cache import Entry
from kvtier_vllm.identity import model_weights
from kvtier_vllm.identity.model_weights import ModelWeights, Unknown


def test_every_byte_counts(tmp_path):
    """One row of an embedding, one expert of many: a bit anywhere, in every piece that is read and at its ends."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(40 << 20, dtype=torch.uint8)}, file)
    seen = {weights.digest(tmp_path)}
    edits = [1 << 10, (16 << 20) - 1, 16 << 20, (16 << 20) + 1, (32 << 20) + 77_777, file.stat().st_size - 1]
    for at in edits:
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(b"\1")
        seen.add(weights.digest(tmp_path))
    assert len(seen) == 1 + len(edits)


def test_bytes_that_move_from_one_piece_or_file_to_the_next_count(tmp_path):
    half, file = bytes(16 << 20), tmp_path / "a.bin"
    digests = set()
    for first, second in ((half + b"1", half), (half, b"1" + half)):
        file.write_bytes(first)
        (tmp_path / "b.bin").write_bytes(second)
        digests.add(weights.digest(tmp_path))
    assert len(digests) == 2


def test_sampling_sees_every_tensor(tmp_path):
    import tiny_llama

    tiny_llama.make(tmp_path)
    file = tmp_path / "model.safetensors"
    before, tensors = weights.digest(tmp_path, sampled=True), load_file(file)
    for name in tensors:
        changed = {**tensors, name: tensors[name] * 1.5 + 0.1}
        save_file(changed, file, metadata={"format": "pt"})
        assert weights.digest(tmp_path, sampled=True) != before, name
    save_file(tensors, file, metadata={"format": "pt"})
    assert weights.digest(tmp_path, sampled=True) == before


def test_sampling_reads_a_large_tensor_from_its_first_byte_to_its_last(tmp_path):
    seen = set()
    for changed in (slice(0), slice(1), slice(-1, None), *(slice(i << 15, (i + 1) << 15) for i in range(32))):
        large = torch.zeros(1 << 20, dtype=torch.uint8)
        large[changed] = 1
        save_file({"w": large}, tmp_path / "model.safetensors")
        seen.add(weights.digest(tmp_path, sampled=True))
    assert len(seen) == 35
    assert weights.digest(tmp_path) not in seen


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "modeling.py",
        "extra.bin",
        "extra.gguf",
        "second.safetensors",
        "w.pt",
        "LICENSE-2.safetensors",
    ],
)
def test_all_files_beside_the_weights_count(tmp_path, name):
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    before = weights.digest(tmp_path)
    save_file({"v": torch.ones(4)}, tmp_path / name)
    assert weights.digest(tmp_path) != before


def test_other_formats_are_read_whole(tmp_path):
    (tmp_path / "model.bin").write_bytes(bytes(1 << 20))
    before = weights.digest(tmp_path)
    with (tmp_path / "model.bin").open("r+b") as file:
        file.seek(500_001)
        file.write(b"\1")
    assert weights.digest(tmp_path) != before
    assert weights.digest(tmp_path / "model.bin") is not None


def test_no_weights_no_identity(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weights.digest(tmp_path) is None


def test_subfolders_count_and_files_that_are_not_loaded_do_not(tmp_path):
    (tmp_path / "encoder").mkdir()
    save_file({"w": torch.zeros(4)}, tmp_path / "encoder" / "model.safetensors")
    before = weights.digest(tmp_path)
    for name in ("README.md", "LICENSE", ".gitattributes", "preview.png"):
        (tmp_path / name).write_text("words")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "state.bin").write_text("words")
    assert weights.digest(tmp_path) == before
    save_file({"w": torch.ones(4)}, tmp_path / "encoder" / "model.safetensors")
    assert weights.digest(tmp_path) != before


def test_files_of_the_hubs_cache_count_by_their_bytes_whatever_their_names_claim(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    link = snapshot / "model.safetensors"

    def of(name, content):
        (blobs / name).write_bytes(content)
        link.unlink(missing_ok=True)
        link.symlink_to(blobs / name)
        return weights.digest(snapshot)

    assert of("a" * 64, b"weights") == of("b" * 64, b"weights")
    assert of("a" * 64, b"weights") != of("a" * 64, b"others.")


def test_a_digest_is_remembered_until_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digest_cache, "_SETTLE_TIME", 0.0)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    before = weights.digest(folder)
    monkeypatch.setattr(weights, "_digest", lambda *_, **__: "0" * 64)
    assert weights.digest(folder) == before
    file = folder / "model.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")
    os.utime(file, ns=times)  # as a tool does that hides its traces; the kernel's own time stamp tells
    assert weights.digest(folder) == "0" * 64


def test_a_memory_that_others_could_write_to_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = Entry("weights", (("model.safetensors", 1, 2, 3, 4, 5),))
    entry.remember("0" * 64)
    folder = tmp_path / "kvtier" / "digests"
    assert entry.recall() == "0" * 64
    assert Entry("weights, sampled", (("model.safetensors", 1, 2, 3, 4, 5),)).recall() is None
    folder.chmod(0o770)
    assert entry.recall() is None
    folder.chmod(0o700)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("0" * 63)
    assert entry.recall() is None


@pytest.mark.parametrize("cache", ["", "relative"])
def test_without_a_home_nothing_is_remembered(tmp_path, monkeypatch, cache):
    """And no folder is made where the engine happens to run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "~")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    entry = Entry("weights", (("model.safetensors", 1),))
    with entry.alone():
        entry.remember("0" * 64)
    assert entry.recall() is None
    assert list(tmp_path.iterdir()) == []


def test_files_that_have_just_changed_are_not_remembered(tmp_path, monkeypatch):
    """Another change might leave no trace in their time stamps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Entry("weights", (("model.safetensors", 1, 2, 3, 4, time.time_ns()),)).remember("0" * 64)
    assert not (tmp_path / "kvtier").exists()


def test_of_two_that_ask_at_once_one_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digest_cache, "_SETTLE_TIME", 0.0)
    (tmp_path / "model.bin").write_bytes(bytes(1 << 20))
    read = weights._digest
    reads = []

    def slow(*arguments, **options):
        reads.append(arguments)
        time.sleep(0.3)
        return read(*arguments, **options)

    monkeypatch.setattr(weights, "_digest", slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(weights.digest(tmp_path / "model.bin"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 2
    assert len(reads) == 1


def test_readers_of_different_files_do_not_wait_for_each_other(tmp_path, monkeypatch):
    """A request with an adapter does not stand still while another engine reads its model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entered = threading.Event()

    def read_others():
        with Entry("weights", (("adapter.safetensors", 1),)).alone():
            entered.set()

    with Entry("weights", (("model.safetensors", 1),)).alone():
        threading.Thread(target=read_others, daemon=True).start()
        assert entered.wait(HANG)


def test_one_reads_where_the_cache_was_opened_to_a_group(tmp_path, monkeypatch):
    """As in a claim that has the home, at each start of its pod."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = Entry("weights", (("model.safetensors", 1),))
    for _ in range(2):
        with entry.alone():
            (lock,) = (tmp_path / "kvtier" / "digests").iterdir()
            with open(lock) as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kubelet_opens(tmp_path / "kvtier" / "digests")


# -- of an engine ------------------------------------------------------------------------------------------


def configs(model, **options):
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(str(model), dtype="float32", skip_tokenizer_init=True, **options)
    return config.create_model_config(), config.create_load_config()


def test_the_weights_of_an_engine_are_all_of_its_folder(model):
    assert model_weights.identify(*configs(model), IdentityConfig()) == ModelWeights(weights.digest(model))
    sampled = model_weights.identify(*configs(model), IdentityConfig("sampled"))
    assert sampled.fact == f"sampled {weights.digest(model, sampled=True)}"
    assert "is not seen" in sampled.warning


def test_weights_that_do_not_come_from_files_are_not_guessed(model):
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("acme")
    class Loader(DummyModelLoader):
        pass

    for load_format in ("acme", "tensorizer", "runai_streamer", "modelexpress", "ipc_cache", "npcache"):
        unknown = model_weights.identify(*configs(model, load_format=load_format), IdentityConfig())
        assert isinstance(unknown, Unknown), load_format
        assert unknown.reason == (
            f"load_format {load_format!r} reads the weights from a source that kvtier cannot identify; "
            "name them with identity: {weights: name:…}"
        )
        named = model_weights.identify(*configs(model, load_format=load_format), IdentityConfig("name:acme 7"))
        assert named.fact == f"name:acme 7, load_format {load_format}"
        assert "this is not checked" in named.warning


def test_weights_in_an_object_store_are_not_guessed(model):
    """The engine runs from a copy of the small files in the store; those of the weights are streamed."""
    config, load = configs(model)
    config.model_weights = "s3://models/llama"
    assert model_weights.identify(config, load, IdentityConfig()) == Unknown(
        "the weights are in s3://models/llama, not on this disk; name them with identity: {weights: name:…}"
    )
    assert model_weights.identify(config, load, IdentityConfig("name:llama@7")).fact.startswith("name:llama@7")


def test_a_loader_put_in_the_place_of_vllms_own_is_not_trusted(model, monkeypatch):
    from vllm.model_executor import model_loader

    class Loader(model_loader.DefaultModelLoader):
        pass

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Loader)
    assert isinstance(model_weights.identify(*configs(model), IdentityConfig()), Unknown)


def test_dummy_weights_are_their_seed(model):
    asked = IdentityConfig()
    first, second = (model_weights.identify(*configs(model, load_format="dummy", seed=seed), asked) for seed in (1, 2))
    assert first != second
    assert first != model_weights.identify(*configs(model), asked)


FORMATS = ("auto", "hf", "safetensors", "mistral", "pt", "fastsafetensors", "sharded_state")
#: Of folders with these files, the formats that share KV.
ALIKE = {
    "model.safetensors": FORMATS[:3],
    "model-1.safetensors model-2.safetensors below/consolidated.safetensors.json": FORMATS[:3],
    "model.safetensors pytorch_model.bin model.pt": FORMATS[:3],
    "model.safetensors consolidated.safetensors": (),
    "consolidated-1.safetensors": (),
    "pytorch_model.bin": (),
    "model.pt": (),
    "below/model.safetensors pytorch_model.bin model.pt": (),
}


def files_read(folder, load_format):
    """What vLLM's own loader would read, and whether as safetensors; None if it can read nothing."""
    from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

    loader = get_model_loader(LoadConfig(load_format=load_format))
    if not isinstance(loader, DefaultModelLoader):
        return load_format
    try:
        return loader._prepare_weights(str(folder), None, None, True, None)
    except RuntimeError:
        return None


@pytest.mark.parametrize("names", ALIKE)
def test_formats_share_where_each_reads_the_same_files(tmp_path, names):
    for number, name in enumerate(names.split()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"w": torch.full((4,), float(number))}, tmp_path / name)
    model = types.SimpleNamespace(model=str(tmp_path), revision=None, model_weights="")
    loads = {each: LoadConfig(load_format=each) for each in FORMATS}
    facts = {each: model_weights.identify(model, load, IdentityConfig()).fact for each, load in loads.items()}
    shared = [each for each in FORMATS if facts[each] == weights.digest(tmp_path)]
    assert shared == list(ALIKE[names])
    assert len(set(facts.values())) == len(FORMATS) - len(shared) + bool(shared)
    assert all(files_read(tmp_path, each) == files_read(tmp_path, "auto") for each in shared)


@pytest.mark.parametrize("way", ["full", "sampled", "name:acme 7"])
def test_a_format_counts_however_weights_are_identified(model, tmp_path, way):
    """Also where an operator names them: kvtier then knows no folder."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    found = {model_weights.identify(*configs(tmp_path, load_format=each), IdentityConfig(way)) for each in FORMATS}
    assert len(found) == len(FORMATS)


def test_another_format_of_the_same_files_hits_and_other_files_of_the_folder_do_not(engine, model, tmp_path):
    """The files of the other format hold other weights, as if somebody had converted an earlier version."""
    shutil.copytree(model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    torch.save({name: tensor * 1.5 for name, tensor in tensors.items()}, tmp_path / "model" / "model.pt")
    asked, answers = prompt(64, 530), {}
    for load_format in ("auto", "safetensors", "hf", "pt"):
        with engine(cpu_and_disk(tmp_path / "disk"), model=tmp_path / "model", load_format=load_format) as served:
            answers[load_format] = served.ask(asked)[0]
    assert [answer.cached for answer in answers.values()] == [0, 512, 512, 0]
    assert answers["auto"].differs(answers["safetensors"]) == answers["auto"].differs(answers["hf"]) == 0
    assert answers["auto"].differs(answers["pt"]) > 0.1


def test_missing_weights_are_not_guessed(model, tmp_path):
    config, load = configs(model)
    config.model = "acme/no-such-model"
    unknown = model_weights.identify(config, load, IdentityConfig())
    assert unknown.reason.startswith("cannot read the weights of acme/no-such-model from this disk: ")
    config.model = str(tmp_path)
    assert model_weights.identify(config, load, IdentityConfig()) == Unknown(f"no weights in {tmp_path}")
