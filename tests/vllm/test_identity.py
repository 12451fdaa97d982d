"""What decides who may share KV: one ingredient at a time is changed, and each time nothing may be shared."""

from __future__ import annotations

import attrs
import pytest

from kvtier_core.types import Namespace
from kvtier_core.vllm import identity, weights
from kvtier_core.vllm.plan import Survey

CHUNK = 64


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
