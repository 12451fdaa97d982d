"""What decides which engines may share KV: all that is not known to be harmless, one ingredient at a time."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import types
import typing

import attrs
import pytest
import torch

from kvtier_core.config.model import IdentityConfig
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.layouts import Elements
from kvtier_core.types import Namespace
from kvtier_testing.samples import make_group
from kvtier_vllm.identity import harmless, model_weights, namespace, settings
from kvtier_vllm.identity.settings import UnidentifiedError

CHUNK = 64
REPORT = WorkerReport(
    "cpu", (make_group((4096, 4096)),), (("page layout", "NHD"), ("attention backend", "CPU_ATTN"), ("cpu isa", "amx"))
)


def engine_config(model, **options):
    from real_engines import look_at_models_here
    from vllm.engine.arg_utils import EngineArgs

    look_at_models_here()
    defaults = {"dtype": "float32", "max_model_len": 1024, "block_size": 32, "skip_tokenizer_init": True}
    return EngineArgs(str(model), **{**defaults, **options}).create_engine_config()


@pytest.fixture(scope="module")
def base(model):
    return engine_config(model)


def facts(config, *, weights="w", chunk_tokens=CHUNK, report=REPORT):
    return namespace.of_engine(config, weights, chunk_tokens, report)


OF_TORCH = (torch.nn.Linear(1, 1),)


def of_worker(config, *identity, models=OF_TORCH):
    return namespace.facts_of_worker(config, IdentityConfig(*identity), models)


# -- the whole of vLLM's configuration --------------------------------------------------------------------


def configs_in(annotation) -> list[type]:
    """The dataclasses that a field may hold."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for argument in typing.get_args(annotation) for found in configs_in(argument)]


def every_field(holder, kinds=(), path=""):
    """Each field of a configuration and of those below it: who holds it, its name, and its path.

    What is not set is filled in, so that its fields are seen as well.
    """
    kind = type(holder)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(holder):
        name = f"{path}{field.name}"
        value = getattr(holder, field.name, None)
        inner = [each for each in configs_in(hints[field.name]) if each not in (*kinds, kind)]
        if value is None and inner:
            value = empty(inner[0])
            object.__setattr__(holder, field.name, value)
        if inner and dataclasses.is_dataclass(value):
            yield from every_field(value, (*kinds, kind), f"{name}.")
        else:
            yield holder, field.name, name


def empty(kind: type) -> object:
    """An instance in which nothing is set, made without the checks of its constructor."""
    instance = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(instance, field.name, None)
    return instance


def may_differ(path: str) -> bool:
    steps = path.split(".")
    return any(".".join(steps[: i + 1]) in harmless.FIELDS for i in range(len(steps)))


def test_every_field_of_the_configuration_counts_unless_it_is_known_to_be_harmless(model, monkeypatch):
    config = engine_config(model)
    fields = list(every_field(config))
    # Reading what is installed takes as long as all the rest.
    monkeypatch.setattr(importlib.metadata, "entry_points", importlib.metadata.EntryPoints)
    before = facts(config)
    wrong = []
    for holder, field, path in fields:
        kept = getattr(holder, field)
        object.__setattr__(holder, field, "another value")
        if (facts(config) == before) is not may_differ(path):
            wrong.append(path)
        object.__setattr__(holder, field, kept)
    assert not wrong
    assert len(fields) > 400
    assert facts(config) == before


def test_no_entry_of_the_table_is_there_in_vain(model):
    """A field that this vLLM does not have may hide one that it renamed."""
    known = {path for _, _, path in every_field(engine_config(model))}
    known |= {path.rsplit(".", steps)[0] for path in known for steps in range(path.count(".") + 1)}
    assert not harmless.FIELDS - known


def test_a_field_that_another_version_adds_counts(base):
    @dataclasses.dataclass
    class Newer(type(base)):
        temperature_of_attention: float = 1.0

    newer = object.__new__(Newer)
    newer.__dict__.update(base.__dict__, temperature_of_attention=1.0)
    before = facts(newer)
    newer.temperature_of_attention = 2.0
    ((name, here, there),) = facts(newer).differences(before)
    assert (name, here, there) == ("temperature_of_attention", "2.0", "1.0")


def test_every_variable_that_vllm_reads_counts_unless_it_is_known_to_be_harmless():
    from vllm.envs import environment_variables

    for name in environment_variables:
        changed = settings.variables({name: "a"}) != settings.variables({name: "b"})
        assert changed is (name not in harmless.VARIABLES), name
    made_by_vllm = {"VLLM_DIST_IDENT"}
    of_libraries = {name for name in harmless.VARIABLES if name.startswith(settings.OF_LIBRARIES)}
    assert not harmless.VARIABLES - set(environment_variables) - made_by_vllm - of_libraries


@pytest.mark.parametrize(
    "name", ["NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"]
)
def test_a_variable_that_changes_how_libraries_compute_counts_though_vllm_does_not_read_it(name):
    assert settings.variables({name: "0"}) != settings.variables({name: "1"}) != settings.variables({})


def test_a_variable_that_is_set_changes_the_namespace(base, monkeypatch):
    before = facts(base)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert facts(base).differences(before) == [("environment VLLM_MLA_DISABLE", "1", "")]


def test_variables_of_plugins_count_and_are_not_shown():
    found = settings.variables({"VLLM_ACME_TOKEN": "secret", "HOME": "/root", "PATH": "/bin"})
    assert list(found) == ["environment VLLM_ACME_TOKEN"]
    assert "secret" not in str(found)


def test_credentials_in_free_settings_count_and_are_not_shown(model):
    def of(key):
        return facts(engine_config(model, additional_config={"store": {"url": f"redis://:{key}@store"}}))

    assert of("one") != of("two")
    assert "sesame" not in str(of("sesame"))


def test_possible_credentials_are_not_shown(model, monkeypatch):
    from vllm.envs import environment_variables

    monkeypatch.setitem(environment_variables, "VLLM_NEW_STORE_TOKEN", lambda: None)
    found = settings.variables({"VLLM_NEW_STORE_TOKEN": "sesame"})
    assert found != settings.variables({"VLLM_NEW_STORE_TOKEN": "other"})
    assert "sesame" not in str(found)
    told = facts(engine_config(model, hf_overrides={"store_api_key": "sesame"}))
    assert "model_config.hf_config.store_api_key" in dict(told.facts)
    assert "sesame" not in str(told)
    assert dict(told.facts)["model_config.hf_config.num_key_value_heads"] == "2"


# -- what was found to give wrong answers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"tensor_parallel_size": 2},
        {"enable_lora": True},
        {"model_loader_extra_config": {"enable_multithread_load": True}},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_an_option_that_changes_the_kv_changes_the_namespace(model, base, options):
    assert facts(engine_config(model, **options)).digest != facts(base).digest


def test_the_longest_sequence_counts_if_code_of_the_model_names_it(model, tmp_path):
    """As that of some ropes does. With a draft model it always counts, as one of that model's settings."""
    import tiny_drafts

    short, long = engine_config(model, max_model_len=512), engine_config(model, max_model_len=1024)

    def of_engine(config, *models):
        told = of_worker(config, models=models)
        return facts(config, report=attrs.evolve(REPORT, facts=(*REPORT.facts, *told.items())))

    class Rope(torch.nn.Module):
        """In a file of its own package."""

    naming, without_source, other = (
        type(name, (torch.nn.Module,), {"__module__": where})()
        for name, where in (
            ("LongRope", "vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope"),
            ("Made", "vllm.nowhere"),
            ("Norm", "vllm.model_executor.layers.layernorm"),
        )
    )
    assert of_engine(short, *OF_TORCH, other) == of_engine(long, *OF_TORCH, other)
    for models in ((*OF_TORCH, naming), (torch.nn.Sequential(*OF_TORCH, naming),), (other, without_source)):
        assert of_engine(short, *models).differences(of_engine(long, *models)) == [("longest sequence", "512", "1024")]
    assert of_engine(short, Rope()) != of_engine(long, Rope()), "code of another package may read it anywhere"
    words = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert of_engine(engine_config(model, max_model_len=1024, speculative_config=words), *OF_TORCH) == of_engine(
        short, *OF_TORCH
    )
    tiny_drafts.make_eagle(tmp_path, 1)
    draft = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 2}
    drafting = [engine_config(model, max_model_len=each, speculative_config=draft) for each in (512, 1024)]
    assert len({of_engine(config, *OF_TORCH) for config in drafting}) == 2


@pytest.mark.parametrize("options", [{"lora_target_modules": ["o_proj"]}, {"lora_dtype": "bfloat16"}], ids=str)
def test_the_parts_that_adapters_change_are_a_fact_of_the_namespace(model, options):
    assert facts(engine_config(model, enable_lora=True, **options)) != facts(engine_config(model, enable_lora=True))


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 1024},
        {"enable_prefix_caching": False},
        {"seed": 1},
        {"served_model_name": "other"},
        {"gpu_memory_utilization": 0.5},
        {"disable_log_stats": True},
    ],
    ids=str,
)
def test_an_option_that_does_not_does_not(model, base, options):
    assert facts(engine_config(model, **options)).differences(facts(base)) == []


@pytest.mark.more
def test_how_many_ranks_share_experts_does_not_count_but_that_several_do(tmp_path):
    """They exchange tokens, for which a kernel may round them."""
    import tiny_llama

    tiny_llama.make_experts(tmp_path)
    one, two, three = (facts(engine_config(tmp_path, data_parallel_size=ranks)) for ranks in (1, 2, 3))
    assert one.differences(two) == [("experts exchange tokens", "False", "True")]
    assert two.differences(three) == []


def test_ways_to_quantize_are_distinguished(base):
    """As vLLM keeps ``--quantization-config``: an object of its own, or the mapping that was written."""
    from vllm.config.quantization import QuantizationConfigArgs

    def of(written):
        config = copy.copy(base)
        config.model_config = copy.copy(base.model_config)
        object.__setattr__(config.model_config, "quantization_config", written)
        return facts(config).digest

    ignored = [QuantizationConfigArgs(ignore=["lm_head"]), QuantizationConfigArgs(ignore=["gate"]), None]
    assert len({of(each) for each in [*ignored, {"ignore": ["lm_head"]}]}) == 4


def test_a_file_that_a_setting_names_counts_with_its_content(base, tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    before = settings._plain(str(scales), "")
    scales.write_text("2")
    assert settings._plain(str(scales), "") != before


def test_a_setting_that_cannot_be_compared_is_not_guessed(base):
    config = copy.copy(base)
    config.additional_config = {"hook": lambda: None}
    why = r"vLLM's setting additional_config\.hook is a function, which cannot be compared between engines"
    with pytest.raises(UnidentifiedError, match=why):
        facts(config)


def test_a_file_that_a_setting_names_and_that_cannot_be_read_is_not_guessed(base, tmp_path, monkeypatch):
    (tmp_path / "scales.json").write_text("1")
    monkeypatch.setattr(settings.weights, "file_digest", lambda path: path.joinpath("none").read_bytes())
    with pytest.raises(UnidentifiedError, match=r"cannot read .*scales\.json: Not a directory"):
        settings._plain(str(tmp_path / "scales.json"), "")


# -- what the engine adds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "other"},
        {"chunk_tokens": 128},
        *(
            {"report": attrs.evolve(REPORT, groups=(attrs.evolve(REPORT.groups[0], **change),))}
            for change in (
                {"name": "group 1"},
                {"page_nbytes": (4096, 8192)},
                {"block_tokens": 32},
                {"dtype": "bfloat16"},
                {"structure": "keys and values"},
            )
        ),
        {"report": attrs.evolve(REPORT, groups=REPORT.groups * 2)},
    ],
    ids=str,
)
def test_facts_reported_by_an_engine_change_the_namespace(base, change):
    assert facts(base, **change).digest != facts(base).digest


@pytest.mark.parametrize("fact", range(len(REPORT.facts)))
def test_every_fact_of_the_pages_counts(base, fact):
    changed = [*REPORT.facts]
    changed[fact] = (changed[fact][0], "other")
    assert facts(base, report=attrs.evolve(REPORT, facts=tuple(changed))).digest != facts(base).digest


def test_the_format_and_the_engines_version_count(base, monkeypatch):
    before = facts(base).digest
    monkeypatch.setattr(namespace, "FORMAT_VERSION", -1)
    other_format = facts(base).digest
    monkeypatch.undo()
    monkeypatch.setattr(namespace.vllm, "__version__", "0.33.0")
    assert len({before, other_format, facts(base).digest}) == 3


def test_a_model_from_elsewhere_counts_with_its_code(base, tmp_path, monkeypatch):
    package = tmp_path / "acme"
    package.mkdir()
    (package / "__init__.py").write_text("from acme.llama import Llama")
    (package / "llama.py").write_text("class Llama: pass")
    monkeypatch.syspath_prepend(tmp_path)
    import acme

    monkeypatch.setattr(namespace, "get_model_cls", lambda model: acme.Llama)
    before = of_worker(base)
    (package / "llama.py").write_text("class Llama: scale = 2")
    after = of_worker(base)
    assert before["model code"] != after["model code"]
    assert before["model code"].startswith("acme.llama.Llama ")


def test_a_model_whose_code_cannot_be_told_is_not_guessed(base, tmp_path, monkeypatch):
    made_here = type("Llama", (), {"__module__": "made_here"})
    monkeypatch.setattr(namespace, "get_model_cls", lambda model: made_here)
    with pytest.raises(UnidentifiedError, match=r"the code of the model, made_here\.Llama, is not in a file"):
        of_worker(base, "name:acme 7")
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    for file in ("gone.py", "packed.zip/made_here/__init__.py"):
        sys.modules["made_here"].__file__ = str(tmp_path / file)
        with pytest.raises(UnidentifiedError, match=r"cannot read the code of the model, made_here\.Llama: "):
            of_worker(base, "name:acme 7")


@pytest.fixture
def tower(tmp_path, monkeypatch):
    """``tower()`` imports a package of that name, as its files are now."""
    package = tmp_path / "tower"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "math.py").write_text("def scale(x): return x")
    mlp = "class MLP(nn.Module):\n    def forward(self, x): return scale(x)"
    (package / "mlp.py").write_text(f"from torch import nn\nfrom tower.math import scale\n{mlp}")
    monkeypatch.syspath_prepend(tmp_path)

    def imported():
        import tower.mlp

        return tower

    yield imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "tower"]:
        del sys.modules[name]


def in_a_layer(tower):
    """Deep in a model whose own class is the engine's."""
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(tower.mlp.MLP()))


def derived(tower):
    return type("OfTheEngine", (tower.mlp.MLP,), {"__module__": "vllm.layers"})()


def in_place_of_a_method(tower):
    patched = type("OfTheEngine", (torch.nn.Module,), {"__module__": "vllm.layers"})
    patched.forward = tower.mlp.MLP.forward
    return patched()


def in_place_of_an_instances_method(tower):
    layer = torch.nn.Linear(1, 1)
    layer.forward = tower.mlp.scale
    return layer


def test_a_helper_on_torchs_own_class_is_no_code_of_the_model(base, monkeypatch):
    """As transformers adds one when it makes its first model in a process, whichever that is."""
    monkeypatch.setattr(torch.nn.Module, "smart_apply", lambda self: None, raising=False)
    assert of_worker(base)["packages in the model"] == "none"


def in_place_of_torchs_forward(tower):
    layer = type("Linear", (torch.nn.Linear,), {"__module__": "torch.nn"})
    layer.forward = tower.mlp.MLP.forward
    return layer(1, 1)


@pytest.mark.parametrize(
    "place",
    [in_a_layer, derived, in_place_of_a_method, in_place_of_an_instances_method, in_place_of_torchs_forward],
)
def test_all_code_of_a_package_that_is_in_the_model_counts(base, tower, tmp_path, place):
    """Also what its modules only call."""
    models = [place(tower())]
    before = of_worker(base, models=models)["packages in the model"]
    assert before.startswith("tower ") and "," not in before
    (tmp_path / "tower/math.py").write_text("def scale(x): return 2 * x")
    assert of_worker(base, models=models)["packages in the model"] != before


def test_the_engines_own_code_is_no_package_of_its_own(base):
    assert of_worker(base)["packages in the model"] == "none"


def test_a_model_that_is_not_shown_is_not_guessed(base):
    with pytest.raises(
        UnidentifiedError, match="this vLLM does not expose its model, so its code cannot be identified"
    ):
        of_worker(base, models=())


def test_a_model_with_weights_from_two_places_is_not_guessed(base, monkeypatch):
    from vllm.model_executor.models.ultravox import UltravoxModel

    monkeypatch.setattr(namespace, "get_model_cls", lambda model: UltravoxModel)
    why = "may load weights from a second place; name them with identity: {weights: name:…}"
    with pytest.raises(UnidentifiedError, match=re.escape(why)):
        of_worker(base)
    assert of_worker(base, "name:ultravox of Tuesday")


# -- engines with other ranks ------------------------------------------------------------------------------


def by_head(heads, inner=64):
    """A group whose pages have these heads of a rank, of which each has ``inner`` numbers in a row."""
    row = heads * inner
    lie = tuple(Elements(heads, 16, inner // 2, half * inner // 2, inner, row, 1) for half in range(2))
    return attrs.evolve(make_group((16 * row * 4,)), structure="keys and values", dtype="float32", elements=lie)


def of_ranks(model, ranks, group, own_ranks="", **options):
    report = attrs.evolve(REPORT, groups=(group,), own_ranks=own_ranks)
    return facts(engine_config(model, tensor_parallel_size=ranks, **options), report=report)


def test_engines_of_any_ranks_have_one_namespace(model):
    assert of_ranks(model, 1, by_head(2)) == of_ranks(model, 2, by_head(1))


def test_ranks_count_if_heads_have_another_order_or_number(model):
    (keys, values) = by_head(1).elements
    tokens_inside = attrs.evolve(by_head(1), elements=(keys, attrs.evolve(values, of_head=16 * 64)))
    others = by_head(2), by_head(1, inner=32), tokens_inside, attrs.evolve(by_head(1), dtype="bfloat16")
    assert len({of_ranks(model, 2, each).digest for each in (by_head(1), *others)}) == 5
    assert of_ranks(model, 1, by_head(2)) != of_ranks(model, 2, by_head(1), dtype="bfloat16")


def test_the_number_of_ranks_counts_unless_they_share(model):
    assert of_ranks(model, 1, by_head(2), "ranks: own") != of_ranks(model, 2, by_head(2), "ranks: own")
    assert of_ranks(model, 1, by_head(2)) != of_ranks(model, 1, by_head(2), "ranks: own")


def test_no_field_of_ranks_is_there_in_vain(model):
    one, two = (dict(of_ranks(model, ranks, by_head(2), "ranks: own").facts) for ranks in (1, 2))
    assert {name for name in one if one[name] != two[name]} == harmless.OF_RANKS


# -- drafts ------------------------------------------------------------------------------------------------


def test_drafts_from_the_tokens_alone_are_no_fact(model, base):
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert facts(engine_config(model, speculative_config=drafting)) == facts(base)


@pytest.fixture
def drafting(model, tmp_path):
    """``drafting(name, seed)`` is the configuration of an engine with a draft model in a folder of that name."""
    import tiny_drafts

    def configure(name="draft", seed=1, **more):
        if not (tmp_path / name).exists():
            tiny_drafts.make_eagle(tmp_path / name, seed)
        speculative = {"method": "eagle", "model": str(tmp_path / name), "num_speculative_tokens": 2, **more}
        return engine_config(model, speculative_config=speculative)

    return configure


@pytest.mark.more
def test_a_draft_model_counts_by_its_weights_and_not_by_its_folder(drafting):
    first, moved, other = drafting("first"), drafting("moved"), drafting("other", seed=2)
    weights = [model_weights.identify_all(config, IdentityConfig()).fact for config in (first, moved, other)]
    assert weights[0] == weights[1] != weights[2]
    assert facts(first) == facts(moved)
    own = model_weights.identify(first.model_config, first.load_config, IdentityConfig())
    assert weights[0].startswith(f"{own.fact}; draft model: ")


def test_a_draft_model_counts_with_its_settings_and_its_code(drafting, base):
    config = drafting()
    before = facts(config)
    assert before != facts(base)
    config.speculative_config.draft_model_config.hf_config.rope_theta = 20000.0
    assert facts(config) != before
    assert "EagleLlama" in of_worker(config)["draft model code"]
    assert "draft model code" not in of_worker(base)


def test_weights_of_a_draft_model_that_do_not_come_from_files_are_not_guessed(drafting):
    config = drafting(draft_load_config={"load_format": "tensorizer"})
    unknown = model_weights.identify_all(config, IdentityConfig())
    assert isinstance(unknown, model_weights.Unknown)
    assert unknown.reason.startswith("draft model: load_format 'tensorizer'")
    named = model_weights.identify_all(config, IdentityConfig("name:acme 7")).fact
    assert named == "name:acme 7, load_format auto; draft model: name:acme 7, load_format tensorizer"


def test_a_draft_model_counts_with_its_format_unless_each_would_read_the_same_files(drafting, tmp_path):
    drafting()
    others = tmp_path / "others"
    shutil.copytree(tmp_path / "draft", others)
    (others / "model.safetensors").rename(others / "model.pt")
    for name, count in (("draft", 1), ("others", 2)):
        configs = [drafting(name, draft_load_config={"load_format": each}) for each in ("auto", "safetensors")]
        assert len({model_weights.identify_all(config, IdentityConfig()) for config in configs}) == count
        assert facts(configs[0]) == facts(configs[1])


# -- the same everywhere -----------------------------------------------------------------------------------


def test_namespaces_are_the_same_on_every_machine():
    model = Namespace.of({"model": "LlamaForCausalLM", "weights": "é"})
    # blake2b of [["model","LlamaForCausalLM"],["weights","\\u00e9"]], by hand
    assert model.digest.hex() == "e658196d344ef2c4dd1474977556d0a2d63eb44a34bedaa4215af506bb982d03"


def test_an_epoch_shares_nothing_with_any_other():
    first = Namespace.of({"model": "m"})
    assert len({first.digest, first.renewed().digest, first.renewed().digest}) == 3


@pytest.mark.more
def test_the_command_tells_what_an_engine_in_another_process_will_log(model, engine, said, tmp_path, capsys):
    from real_engines import cpu
    from vllm import envs

    from kvtier_core.cli import main

    told = tmp_path / "told.json"
    arguments = ["--dtype", "float32", "--max-model-len", "2048", "--skip-tokenizer-init", "--enforce-eager"]
    start = "import sys; from kvtier_core.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "identity", "--model", str(model), "--json", "--"]
    elsewhere = {**os.environ, "PYTHONHASHSEED": "7", "HOME": str(tmp_path), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    elsewhere["VLLM_CACHE_ROOT"] = envs.VLLM_CACHE_ROOT  # else it imports vLLM once more, to look at the model
    output = subprocess.run([*command, *arguments], env=elsewhere, cwd=tmp_path, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    told.write_text(output.stdout)
    with engine(cpu()) as served:
        (logged,) = [line for line in said() if line.startswith("kvtier: identity ")]
        running = served.connector.side.namespace
        assert logged.startswith(f"kvtier: identity {running.digest.hex()[:8]}: ")
    before = Namespace.from_json(told.read_text())
    assert [each for each in before.differences(running) if each[1]] == []

    kept = tmp_path / "running.json"
    kept.write_text(running.to_json())
    capsys.readouterr()  # vLLM's log is here where no test has imported vLLM before
    assert main(["identity", "--diff", str(told), str(kept)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "attention backend" in lines[0]


def test_the_command_names_the_facts_that_differ(tmp_path, capsys):
    from kvtier_core.cli import main

    one, other, torn = (tmp_path / name for name in ("one", "other", "torn"))
    one.write_text(Namespace.of({"dtype": "float32", "weights": "w", "page layout": "NHD"}).to_json())
    other.write_text(Namespace.of({"dtype": "bfloat16", "weights": "w"}).to_json())
    torn.write_text(json.dumps({"dtype": 1}))
    assert main(["identity", "--diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "dtype",
        f"  {one}: float32",
        f"  {other}: bfloat16",
        f"only in {one}: page layout",
    ]
    assert main(["identity", "--diff", str(one), str(one)]) == 0
    assert main(["identity", "--diff", str(one), str(torn)]) == 2
    assert main(["identity", "--diff", str(one), str(tmp_path / "none")]) == 2
