"""LoRA adapters served by a real engine: each has the KV of its own weights, whatever its name and number."""

from __future__ import annotations

import json
import time

import pytest
import tiny_llama
import torch
from real_engines import cpu_and_disk, prompt
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from kvtier_vllm.requests import adapters

RANK = 8
PROMPT = prompt(1, 200)


def write(folder, seed):
    """An adapter of all queries and values of the tiny Llama, strong enough to change every answer."""
    folder.mkdir(exist_ok=True)
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(tiny_llama.LAYERS):
        for matrix, rows in [("q_proj", 256), ("v_proj", 128)]:
            name = f"base_model.model.model.layers.{layer}.self_attn.{matrix}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, tiny_llama.HIDDEN, generator=drawn) / 16
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=drawn)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def ask(engine, folder, number=1, name="one name"):
    adapter = folder and LoRARequest(name, number, str(folder))
    (answer,) = engine.generate({"prompt_token_ids": PROMPT}, adapter=adapter)
    return answer


@pytest.fixture
def lora(engine, monkeypatch):
    """An engine with adapters, on the disk of the one before."""
    monkeypatch.setattr(adapters, "_MARGIN", 10_000_000)  # the tests' files are new, and on one machine

    def start(path):
        time.sleep(0.02)
        return engine(cpu_and_disk(path), enable_lora=True, max_lora_rank=RANK, max_loras=2)

    return start


def test_after_a_restart_each_adapter_finds_only_its_own(lora, tmp_path):
    one, two, disk = tmp_path / "one", tmp_path / "two", tmp_path / "disk"
    write(one, 1)
    write(two, 2)
    with lora(disk) as engine:
        plain, first, second = ask(engine, None), ask(engine, one, 1), ask(engine, two, 2)
        assert min(plain.differs(first), plain.differs(second), first.differs(second)) > 0.1
        engine.settle()
    write(tmp_path / "three", 3)
    with lora(disk) as engine:
        third = ask(engine, tmp_path / "three", 1)  # the name and the number of the first
        assert third.cached == 0
        assert min(third.differs(known) for known in (plain, first, second)) > 0.1
        for expected, folder, number, cached in [(second, two, 3, 192), (first, one, 2, 192), (plain, None, 0, 0)]:
            again = ask(engine, folder, number)
            assert again.differs(expected) < 1e-4
            assert again.cached == cached


def test_an_adapter_overwritten_after_it_was_loaded_leaves_nothing(lora, tmp_path, said):
    folder, disk = tmp_path / "one", tmp_path / "disk"
    write(folder, 1)
    with lora(disk) as engine:
        engine.llm.llm_engine.add_lora(LoRARequest("one name", 1, str(folder)))
        write(folder, 2)
        old = ask(engine, folder)
        assert f"{folder} changed after the engine started" in "\n".join(said())
        engine.settle()
    with lora(disk) as engine:
        new = ask(engine, folder)
        assert new.differs(old) > 0.1
        assert new.cached == 0
        assert ask(engine, folder).cached == 192


def test_what_vllm_computes_without_an_adapter_beside_one_is_not_kept(engine, tmp_path, said):
    """Its kernels for CPUs take number -1, the last adapter, for requests without one, if others of the step have one.

    If the second assertion fails, vLLM was mended: then such requests need not be bypassed.
    """
    write(tmp_path / "one", 1)
    adapter, beside = LoRARequest("one", 1, str(tmp_path / "one")), {"prompt_token_ids": prompt(2, 200)}
    options = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    with engine(cpu_and_disk(tmp_path / "disk"), **options) as served:
        alone = ask(served, None)
        mixed, _ = served.generate({"prompt_token_ids": PROMPT}, beside, adapter=[None, adapter])
        assert mixed.differs(alone) > 0.1
        served.settle()
    with engine(cpu_and_disk(tmp_path / "disk"), **options) as served:
        again = ask(served, None)
        assert (again.cached, again.differs(alone)) == (0, 0)
    assert "vLLM's LoRA kernels for this device may apply an adapter to it" in "\n".join(said())


@pytest.mark.more
def test_an_adapter_on_weights_that_changed_finds_no_earlier_kv(lora, tmp_path):
    from test_changed_weights import an_optimizers_step

    folder = tmp_path / "one"
    write(folder, 1)
    with lora(tmp_path / "truth") as engine:
        before = ask(engine, folder)
        an_optimizers_step(engine, None)
        truth = ask(engine, None), ask(engine, folder, 2, "another name")
    with lora(tmp_path / "disk") as engine:
        assert ask(engine, folder).differs(before) < 1e-4
        an_optimizers_step(engine, None)
        for _ in range(3):
            answers = ask(engine, None), ask(engine, folder)
            assert max(a.differs(b) for a, b in zip(answers, truth, strict=True)) < 1e-4
        assert [answer.cached for answer in answers] == [0, 192]
    with lora(tmp_path / "disk") as engine:
        assert ask(engine, folder).differs(before) < 1e-4
