"""What decides who may share KV: one ingredient at a time is changed, and each time nothing may be shared."""

from __future__ import annotations

import os

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.types import Namespace
from kvtier_core.vllm import identity, memo, weights
from kvtier_core.vllm.identity import Identifier, RequestIdentity
from kvtier_core.vllm.plan import Survey

CHUNK = 64
TOKENS = list(range(4 * CHUNK))


# -- an engine -------------------------------------------------------------------------------------------

SURVEY = Survey("cpu", (4096, 4096), (("page layout", "NHD"), ("attention backend", "CPU_ATTN"), ("cpu isa", "amx")))


def engine_config(model, **options):
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"dtype": "float32", "max_model_len": 1024, "block_size": 32, "skip_tokenizer_init": True}
    return EngineArgs(str(model), **{**defaults, **options}).create_engine_config()


@pytest.fixture(scope="module")
def base(model):
    return engine_config(model)


def facts(config, *, weights="w", chunk_tokens=CHUNK, survey=SURVEY):
    return identity.namespace(config, weights, chunk_tokens, survey)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"max_model_len": 512},
        {"block_size": 64},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_an_option_that_changes_the_kv_changes_the_namespace(model, base, options):
    assert facts(engine_config(model, **options)).digest != facts(base).digest


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"enable_prefix_caching": False}, {"seed": 1}], ids=str)
def test_an_option_that_does_not_does_not(model, base, options):
    assert facts(engine_config(model, **options)).digest == facts(base).digest


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "other"},
        {"chunk_tokens": 128},
        {"survey": attrs.evolve(SURVEY, page_nbytes=(4096, 8192))},
    ],
    ids=str,
)
def test_what_an_engine_reports_changes_the_namespace(base, change):
    assert facts(base, **change).digest != facts(base).digest


@pytest.mark.parametrize("fact", range(len(SURVEY.facts)))
def test_every_fact_of_the_pages_counts(base, fact):
    changed = [*SURVEY.facts]
    changed[fact] = (changed[fact][0], "other")
    assert facts(base, survey=attrs.evolve(SURVEY, facts=tuple(changed))).digest != facts(base).digest


def test_the_format_and_the_engines_version_count(base, monkeypatch):
    before = facts(base).digest
    monkeypatch.setattr(identity, "FORMAT_VERSION", 2)
    other_format = facts(base).digest
    monkeypatch.undo()
    monkeypatch.setattr(identity.vllm, "__version__", "0.33.0")
    assert len({before, other_format, facts(base).digest}) == 3


def test_namespaces_are_the_same_on_every_machine():
    namespace = Namespace.of({"model": "LlamaForCausalLM", "weights": "é"})
    # blake2b of [["model","LlamaForCausalLM"],["weights","\\u00e9"]], by hand
    assert namespace.digest.hex() == "e658196d344ef2c4dd1474977556d0a2d63eb44a34bedaa4215af506bb982d03"


def test_an_epoch_shares_nothing_with_any_other():
    first = Namespace.of({"model": "m"})
    assert len({first.digest, first.renewed().digest, first.renewed().digest}) == 3


def test_the_command_tells_what_an_engine_will_log(model, engine, said, capsys):
    from conftest import cpu

    from kvtier_core.cli import main

    arguments = ["identity", "--model", str(model), "--"]
    arguments += ["--dtype", "float32", "--max-model-len", "2048", "--skip-tokenizer-init"]
    assert main(arguments) == 0
    told = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line)
    assert told["weights"] == weights.digest(model)
    with engine(cpu()):
        (logged,) = [line for line in said() if line.startswith("kvtier: identity ")]
    assert told["digest"].split()[-1] == logged.split()[-1]
    capsys.readouterr()
    assert main([*arguments[:-5], "--dtype", "bfloat16", "--max-model-len", "2048"]) == 0
    assert logged.split()[-1] not in capsys.readouterr().out


# -- a request -------------------------------------------------------------------------------------------


def asked(**ingredients):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request("1", TOKENS, SamplingParams(max_tokens=1), None, **ingredients)


def keys(identifier=None, **ingredients):
    """Of one prompt whose request differs in nothing but these."""
    found = (identifier or Identifier()).identify(asked(**ingredients))
    assert isinstance(found, RequestIdentity), found
    database = ChainedConfig().open(Namespace.of({"model": "test"}), CHUNK)
    return database.keys(TOKENS, salt=found.salt, extra=found.extra(CHUNK))


def shared(some, others):
    """How many leading chunks two requests would share."""
    return next((i for i, pair in enumerate(zip(some, others, strict=True)) if pair[0] != pair[1]), len(some))


CAT, DOG = "c" * 64, "d" * 64


def image(identifier, offset, length):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


def adapter(folder, scale=1.0, *, alpha=16, number=1, **options):
    from vllm.lora.request import LoRARequest

    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((4, 4), scale)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    return LoRARequest("same name", number, str(folder), **options)


def test_what_enters_the_keys_is_the_same_on_every_machine():
    """`tests/core/test_chained.py` has the golden vectors of what becomes of it."""
    found = Identifier().identify(asked(cache_salt="alice é", mm_features=[image(CAT, 120, 20)]))
    assert found.salt == b'{"cache_salt": "alice \\u00e9"}'
    assert found.extra(CHUNK) == {1: f'[[56, 20, "{CAT}"]]'.encode(), 2: f'[[-8, 20, "{CAT}"]]'.encode()}


def test_a_salt_separates_everything():
    assert shared(keys(cache_salt="alice"), keys(cache_salt="alice")) == 4
    assert shared(keys(cache_salt="alice"), keys(cache_salt="bob")) == 0
    assert shared(keys(cache_salt="alice"), keys()) == 0


def test_adapters_are_told_apart_by_content(tmp_path):
    first = keys(lora_request=adapter(tmp_path / "one"))
    assert shared(first, keys(lora_request=adapter(tmp_path / "copy"))) == 4
    assert shared(first, keys(lora_request=adapter(tmp_path / "other", 2.0))) == 0
    assert shared(first, keys(lora_request=adapter(tmp_path / "scaled", alpha=32))) == 0
    assert shared(first, keys(lora_request=adapter(tmp_path / "one", is_3d_lora_weight=True))) == 0
    assert shared(first, keys()) == 0
    # A salt that looks like an adapter is none.
    assert shared(first, keys(cache_salt=weights.digest(tmp_path / "one"))) == 0


def test_an_adapter_whose_files_change_under_the_engine_is_bypassed(tmp_path):
    """The engine keeps what it loaded first, or loads it again: nobody can tell."""
    served = Identifier()
    first = keys(served, lora_request=adapter(tmp_path / "one"))
    replaced = adapter(tmp_path / "one", 3.0)
    why = "LoRA adapter 'same name': its files are not those that the engine saw first"
    assert served.identify(asked(lora_request=replaced)) == why
    assert served.identify(asked(lora_request=adapter(tmp_path / "two", 3.0))) == why  # another folder, the same id
    assert shared(first, keys(served, lora_request=adapter(tmp_path / "two", 3.0, number=2))) == 0
    assert shared(first, keys(lora_request=replaced)) == 0  # an engine that sees it first
    why = "LoRA adapter 'same name': it is loaded anew under its old id"
    assert Identifier().identify(asked(lora_request=adapter(tmp_path / "one", load_inplace=True))) == why


def test_an_adapter_that_cannot_be_found_is_bypassed(tmp_path):
    from vllm.lora.request import LoRARequest

    gone = LoRARequest("gone", 1, str(tmp_path / "gone"))
    assert Identifier().identify(asked(lora_request=gone)) == (
        "LoRA adapter 'gone': its weights cannot be read from disk"
    )
    (tmp_path / "empty").mkdir()
    empty = LoRARequest("empty", 1, str(tmp_path / "empty"))
    assert (
        Identifier().identify(asked(lora_request=empty)) == "LoRA adapter 'empty': there are no weights in its folder"
    )


@pytest.mark.parametrize(
    "other, common",
    [
        (image(CAT, 70, 20), 4),
        (image(DOG, 70, 20), 1),  # the image lies in the second chunk
        (image(CAT, 71, 20), 1),
        (image(CAT, 70, 21), 1),
        (image("lora:" + CAT, 70, 20), 1),
        (image(CAT[:-1] + "0", 70, 20), 1),
        (image(DOG, 0, 20), 0),
        (image(DOG, 255, 1), 1),
    ],
)
def test_images_count_where_they_lie(other, common):
    assert shared(keys(mm_features=[image(CAT, 70, 20)]), keys(mm_features=[other])) == common


def test_what_cannot_be_identified_is_bypassed():
    named = image("holiday.jpg", 70, 20)
    assert Identifier().identify(asked(mm_features=[image(CAT, 0, 9), named])) == (
        "an item of its prompt is named by the caller, not by its content"
    )
    assert Identifier().identify(asked(prompt_embeds=torch.zeros(256, 8))) == "its prompt is given as embeddings"


# -- weights ---------------------------------------------------------------------------------------------


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


def test_files_that_have_just_changed_are_not_remembered(tmp_path, monkeypatch):
    """Another change might leave no trace in their time stamps."""
    import time

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memo.remember((("model.safetensors", 1, 2, 3, 4, time.time_ns()),), "0" * 64)
    assert not (tmp_path / "kvtier").exists()
