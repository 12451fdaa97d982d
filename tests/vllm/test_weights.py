"""The digest of the weights: any change to any file of them is another digest."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtier_core.vllm import memo, weights


def test_every_tensor_of_every_file_counts(tmp_path):
    import tiny_llama

    tiny_llama.make(tmp_path)
    file = tmp_path / "model.safetensors"
    before, tensors = weights.digest(tmp_path), load_file(file)
    for name in tensors:
        changed = {**tensors, name: tensors[name] * 1.5 + 0.1}
        save_file(changed, file, metadata={"format": "pt"})
        assert weights.digest(tmp_path) != before, name
    save_file(tensors, file, metadata={"format": "pt"})
    assert weights.digest(tmp_path) == before


def test_a_large_tensor_is_sampled_from_its_first_byte_to_its_last(tmp_path):
    seen = set()
    for changed in (slice(0), slice(1), slice(-1, None), *(slice(i << 15, (i + 1) << 15) for i in range(32))):
        large = torch.zeros(1 << 20, dtype=torch.uint8)
        large[changed] = 1
        save_file({"w": large}, tmp_path / "model.safetensors")
        seen.add(weights.digest(tmp_path))
    assert len(seen) == 35


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "modeling.py", "extra.bin", "extra.gguf", "second.safetensors", "w.pt"]
)
def test_whatever_lies_beside_the_weights_counts(tmp_path, name):
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


def test_a_digest_is_remembered_until_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(memo, "_SETTLED", 0.0)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    before = weights.digest(folder)
    monkeypatch.setattr(weights, "_digest", lambda files: "0" * 64)
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
    state = (("model.safetensors", 1, 2, 3, 4, 5),)
    memo.remember(state, "0" * 64)
    folder = tmp_path / "kvtier" / "weights"
    assert memo.recall(state) == "0" * 64
    folder.chmod(0o770)
    assert memo.recall(state) is None
    folder.chmod(0o700)
    (entry,) = folder.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600
    entry.write_text("0" * 63)
    assert memo.recall(state) is None


@pytest.mark.parametrize("cache", ["", "relative"])
def test_without_a_home_nothing_is_remembered(tmp_path, monkeypatch, cache):
    """And no folder is made where the engine happens to run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "~")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    memo.remember((("model.safetensors", 1),), "0" * 64)
    assert memo.recall((("model.safetensors", 1),)) is None
    assert list(tmp_path.iterdir()) == []


def test_files_that_have_just_changed_are_not_remembered(tmp_path, monkeypatch):
    """Another change might leave no trace in their time stamps."""
    import time

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memo.remember((("model.safetensors", 1, 2, 3, 4, time.time_ns()),), "0" * 64)
    assert not (tmp_path / "kvtier").exists()
