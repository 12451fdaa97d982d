"""Where vLLM reuses no prefixes since that would be wrong, nor does kvtier; where its user alone says so, it does."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from real_engines import BLOCK, cpu_and_disk, prompt
from test_identity import engine_config
from test_layout import groups, spec
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import CpuArchEnum, current_platform

from kvtier_vllm import layout, reuse

TURNED_OFF = "vLLM turned prefix caching off, as it does where reuse would be wrong; its log says why"
CPU_MLA = "vLLM itself does not reuse prefixes with CPU_MLA, which computes wrongly behind one"
UNKNOWN = (
    "prefix caching is off, and whether vLLM turned it off because reuse would be wrong is unknown: name kvtier in "
    "VLLM_PLUGINS, or turn prefix caching on"
)

# -- every place at which vLLM turns it off ----------------------------------------------------------------

#: By file and function: the innermost condition, and how it is found though the cache may have been off anyway.
PLACES = {
    ("engine/arg_utils.py", "_set_default_chunked_prefill_and_prefix_caching_args"): [
        ("self.enable_prefix_caching is None", "`is_prefix_caching_supported` is asked"),
        (
            "current_platform.is_cpu() and current_platform.get_cpu_architecture() in (CpuArchEnum.RISCV,)",
            "`refusal` asks the platform",
        ),
    ],
    ("platforms/cpu.py", "check_and_update_config"): [
        (
            "model_config is not None and model_config.use_mla and (not amx_mla_or_dsv4_enabled)",
            "`refusal_of_backends` knows CPU_MLA; DeepSeek-V4 computes on AMX or not at all",
        ),
    ],
    ("config/vllm.py", "__post_init__"): [
        (
            "self.is_mm_encoder_only and self.cache_config.enable_prefix_caching",
            "`layout.refusal`: it has an ec_transfer_config",
        ),
    ],
    ("model_executor/models/config.py", "verify_and_update_config"): [
        ("cache_config.enable_prefix_caching", "`groups.refusal` does not know RSWASpec"),
    ],
    ("model_executor/layers/attention/attention.py", "__init__"): [
        (
            "cache_config is not None and cache_config.enable_prefix_caching and envs.VLLM_BATCH_INVARIANT and "
            "(self.attn_backend.get_name() == 'FLASHINFER' or self.attn_backend.get_name() == 'TRITON_MLA')",
            "`refusal_of_backends` knows both",
        ),
    ],
    ("model_executor/layers/attention/mla_attention.py", "__init__"): [
        (
            "cache_config is not None and cache_config.enable_prefix_caching and envs.VLLM_BATCH_INVARIANT and "
            "(self.attn_backend.get_name() == 'TRITON_MLA' or self.attn_backend.get_name() == 'FLASHINFER')",
            "`refusal_of_backends` knows both",
        ),
    ],
    ("v1/engine/core.py", "_initialize_kv_caches"): [
        ("vllm_config.cache_config.enable_prefix_caching", "`groups.refusal` asks for non_causal specs"),
    ],
    ("benchmarks/latency.py", "add_cli_args"): [("", "a default of a command, which its user may change")],
}


def decisions(tree: ast.AST, function: str = "", condition: str = "") -> Iterator[tuple[str, str]]:
    """The function and the condition of each statement that may turn prefix caching off."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from decisions(node, name)
                continue
            case ast.If(test=test, body=body, orelse=other):
                yield from decisions(ast.Module(body, []), function, ast.unparse(test))
                yield from decisions(ast.Module(other, []), function, condition)
                continue
            case ast.Assign(targets=targets) if any(_names_it(each) for each in targets):
                yield function, condition
            case ast.AnnAssign(target=target, value=value) if function and value is not None and _names_it(target):
                yield function, condition
            case ast.AugAssign(target=target) if _names_it(target):
                yield function, condition
            case ast.Call(args=[_, ast.Constant(value="enable_prefix_caching"), *_]):
                yield function, condition
            case ast.Call(keywords=keywords) if any(
                each.arg == "enable_prefix_caching" and not _is_read(each.value) for each in keywords
            ):
                yield function, condition
            case ast.Dict(keys=keys, values=values) if any(
                isinstance(key, ast.Constant) and key.value == "enable_prefix_caching" and not _is_read(value)
                for key, value in zip(keys, values, strict=True)
            ):
                yield function, condition
        yield from decisions(node, function, condition)


def _names_it(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "enable_prefix_caching" for each in ast.walk(node))


def _is_read(node: ast.AST) -> bool:
    """Is it the value that another configuration has?"""
    return isinstance(node, ast.Attribute) and node.attr == "enable_prefix_caching"


def test_every_place_at_which_vllm_turns_prefix_caching_off_is_known():
    """A new place, or another condition, is one to look at."""
    root, found = Path(vllm.__file__).parent, {}
    for file in root.rglob("*.py"):
        if "enable_prefix_caching" in (source := file.read_text()):
            for function, condition in decisions(ast.parse(source)):
                found.setdefault((str(file.relative_to(root)), function), []).append(condition)
    assert found == {place: [condition for condition, _ in known] for place, known in PLACES.items()}


@pytest.mark.parametrize(
    "statement",
    [
        "if bad: config.enable_prefix_caching = False",
        "if bad: self.a, cache.enable_prefix_caching = 1, False",
        "if bad: cache.enable_prefix_caching &= good",
        "if bad: setattr(cache, 'enable_prefix_caching', False)",
        "if bad: cache = replace(cache, enable_prefix_caching=False)",
        "if bad: cache = CacheConfig(**{'enable_prefix_caching': False})",
    ],
)
def test_the_walk_sees_every_kind_of_statement(statement):
    assert list(decisions(ast.parse(f"def decide():\n    {statement}"))) == [("decide", "bad")]


# -- what was asked, and what became of it -----------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, True, False])
def test_an_engine_is_served_whether_its_user_wants_the_engines_own_cache_or_not(model, asked):
    config = engine_config(model, enable_prefix_caching=asked)
    assert config.cache_config.enable_prefix_caching is (asked is not False)
    assert reuse.refusal(config) == ""


@pytest.mark.parametrize("asked", [None, True])
def test_an_engine_whose_cache_vllm_turns_off_is_refused(latent, asked):
    """By a condition of vLLM's that kvtier need not know."""
    config = engine_config(latent, enable_prefix_caching=asked, attention_backend="CPU_MLA")
    assert not config.cache_config.enable_prefix_caching
    assert reuse.refusal(config) == TURNED_OFF


def test_also_if_vllm_turns_it_off_later_or_in_another_process(model):
    """A configuration goes to another process as it is copied here."""
    config = copy.deepcopy(engine_config(model))
    assert reuse.refusal(config) == ""
    config.cache_config.enable_prefix_caching = False
    assert reuse.refusal(config) == TURNED_OFF
    unwanted = copy.deepcopy(engine_config(model, enable_prefix_caching=False))
    assert reuse.refusal(unwanted) == ""


def test_where_nobody_noted_what_was_asked_an_engine_without_its_own_cache_is_refused(model, monkeypatch):
    """As in a process in which vLLM loads no plugins."""
    engine_config(model)
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config.__wrapped__)
    assert reuse.refusal(engine_config(model)) == ""
    assert reuse.refusal(engine_config(model, enable_prefix_caching=False)) == UNKNOWN


def test_wishes_are_noted_once(model):
    engine_config(model)
    before = EngineArgs.create_engine_config
    reuse.note_wishes()
    assert EngineArgs.create_engine_config is before


@pytest.mark.parametrize("asked", [None, True, False])
def test_no_engine_on_risc_v_is_served(model, monkeypatch, asked):
    config = engine_config(model, enable_prefix_caching=asked)
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: CpuArchEnum.RISCV)
    why = "vLLM itself does not reuse prefixes on RISC-V"
    assert layout.refusal(config, groups(spec("FullAttentionSpec"))) == why


@pytest.mark.parametrize("backend", ["FLASHINFER", "TRITON_MLA"])
def test_backends_that_vllm_cannot_make_invariant_behind_a_prefix_are_refused(monkeypatch, backend):
    assert reuse.refusal_of_backends({backend, "FLASH_ATTN"}) == ""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    why = f"vLLM itself does not reuse prefixes with {backend} and VLLM_BATCH_INVARIANT"
    assert reuse.refusal_of_backends({backend, "FLASH_ATTN"}) == why
    assert reuse.refusal_of_backends({"FLASH_ATTN"}) == ""


@pytest.mark.parametrize(("asked", "why"), [(None, TURNED_OFF), (False, CPU_MLA)])
def test_latent_attention_whose_kernel_computes_wrongly_behind_a_prefix_is_passed_by(
    engine, said, latent, tmp_path, asked, why
):
    """Also if its user wants no cache of vLLM's, so that vLLM does not say so: that of CPUs without AMX."""
    options = {"model": latent, "enable_prefix_caching": asked, "attention_backend": "CPU_MLA", "block_size": BLOCK}
    prompts = [prompt(230, 300)] * 2
    with engine(**options) as plain:
        truth = [plain.ask(each)[0] for each in prompts]
    said()
    with engine(cpu_and_disk(tmp_path), **options) as passed:
        assert f"kvtier: this engine is not served: {why}" in said()
        answers = [passed.ask(each)[0] for each in prompts]
    assert answers == truth
    assert not list(tmp_path.rglob("*.kv*"))
