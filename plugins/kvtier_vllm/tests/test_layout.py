"""Which engines are refused by their configuration alone, and what an operator is told to do about it."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from types import SimpleNamespace

import attrs
import pytest
import torch
from test_identity import engine_config

from kvtier_core.config.model import IdentityConfig, StackConfig
from kvtier_core.engine.step import ScheduledRequest
from kvtier_core.engine.worker.self_test import try_copies
from kvtier_core.interfaces import PagedKVCache
from kvtier_core.layouts import Elements, KVKind, KVStructure
from kvtier_core.transfer import numa
from kvtier_core.transfer.copier import PlainCopier
from kvtier_core.transfer.host_mover import HostMover
from kvtier_testing.samples import make_layout
from kvtier_vllm import groups as kv_groups
from kvtier_vllm import layout, speculation
from kvtier_vllm.groups import served, structure_of


@pytest.fixture(scope="module")
def base(model):
    return engine_config(model)


@pytest.fixture
def config(base):
    """One that a test may change."""
    changed = copy.copy(base)
    changed.parallel_config = copy.copy(base.parallel_config)
    return changed


def spec(kind, **more):
    from vllm.v1 import kv_cache_interface

    options = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, **more}
    return getattr(kv_cache_interface, kind)(**options)


def groups(*specs):
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], each) for i, each in enumerate(specs)],
    )


@pytest.fixture
def specs():
    from vllm.v1.kv_cache_interface import MambaSpec

    return {
        "full": spec("FullAttentionSpec"),
        "window": spec("SlidingWindowSpec", sliding_window=256),
        "chunked": spec("ChunkedLocalAttentionSpec", attention_chunk_size=256),
        "state": MambaSpec(block_size=32, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"),
        "scratch": spec("CircularBufferSpec"),
    }


@pytest.mark.parametrize(
    "kinds",
    ["full", "window", "full window", "window full chunked", "full state", "full window state", "full scratch"],
)
def test_groups_that_are_served(config, specs, kinds):
    assert layout.refusal(config, groups(*(specs[kind] for kind in kinds.split()))) == ""


def test_scratch_is_no_part_of_a_chunk(specs):
    """A ring that vLLM never reuses for another request."""
    assert served(groups(specs["full"], specs["scratch"], specs["window"])) == (0, 2)


def test_states_alone_are_refused(config, specs):
    assert layout.refusal(config, groups(specs["state"])) == "a model with only recurrent states is not served yet"


def test_states_without_prefix_caching_are_refused(config, specs):
    unkept = dataclasses.replace(specs["state"], mamba_cache_mode="none")
    why = "vLLM keeps no recurrent states of prefixes when prefix caching is off"
    assert layout.refusal(config, groups(specs["full"], unkept)) == why


def test_layers_of_a_group_that_need_different_parts_are_refused(config, specs):
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

    windows = {f"layer {size}": spec("SlidingWindowSpec", sliding_window=size) for size in (128, 256)}
    mixed = groups(specs["full"])
    mixed.kv_cache_groups.append(KVCacheGroupSpec(list(windows), UniformTypeKVCacheSpecs(32, windows)))
    assert layout.refusal(config, mixed) == "the layers of KV cache group 1 need different parts of a prefix"


@pytest.mark.parametrize(
    "kind, more",
    [("RSWASpec", {"rswa_window": 256}), ("SinkFullAttentionSpec", {"sink_len": 4}), ("HiddenStateCacheSpec", {})],
)
def test_a_kind_that_is_not_known_is_refused(config, kind, more):
    """Also one that is derived from full attention: what it keeps and drops is its own."""
    why = f"layer layer 0 keeps {kind} state, and which part of it a prefix needs is unknown"
    assert layout.refusal(config, groups(spec(kind, **more))) == why


OPTIONAL = ("SlidingWindowSpec", {"sliding_window": 256}), ("MLAAttentionSpec", {"num_kv_heads": 1})


@pytest.mark.parametrize("kind, more", OPTIONAL)
def test_a_spec_class_that_this_vllm_lacks_disables_that_kind_alone(monkeypatch, specs, kind, more):
    """Its layers, which have another class then, are refused as those of any unknown kind."""
    from vllm.v1 import kv_cache_interface

    from kvtier_vllm import groups as present

    lacking = spec(kind, **more)
    monkeypatch.delattr(kv_cache_interface, kind)
    found = importlib.util.spec_from_file_location("groups_of_another_vllm", present.__file__)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.refusal(groups(specs["full"], specs["chunked"])) == ""
    why = f"layer layer 1 keeps {kind} state, and which part of it a prefix needs is unknown"
    assert module.refusal(groups(specs["full"], lacking)) == why
    assert module.refusal(groups(specs["full"], specs["state"])) == ""


def test_attention_to_later_tokens_is_refused(config, specs):
    """Then the KV of a token is not that of its prefix."""
    specs["full"] = dataclasses.replace(specs["full"], non_causal=True)
    why = "layer layer 0 attends to later tokens, so KV depends on more than its prefix"
    assert layout.refusal(config, groups(specs["full"])) == why


@pytest.mark.parametrize(
    "kind, more, structure",
    [
        ("FullAttentionSpec", {}, "keys and values"),
        ("FullAttentionSpec", {"dtype": torch.uint8}, "opaque"),
        ("FullAttentionSpec", {"kv_quant_mode": 1}, "opaque"),
        ("MLAAttentionSpec", {}, "MLA latent"),
        ("MLAAttentionSpec", {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla"}, "opaque"),
        ("MLAAttentionSpec", {"cache_role": "indexer"}, "opaque"),
        ("MLAAttentionSpec", {"tokens_per_state": 4}, "opaque"),
    ],
)
def test_the_structure_of_pages_is_stated_only_if_known(kind, more, structure):
    assert structure_of(spec(kind, **more)) == structure


def test_an_engine_alone_is_one_replica(config, specs):
    assert layout.replica_of(config.parallel_config) == (0, 1)
    assert layout.refusal(config, groups(specs["full"])) == ""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_of_a_dense_model_is_a_replica(model, specs, rank):
    """As `EngineCoreProc.run_engine_core` leaves its configuration."""
    config = engine_config(model, data_parallel_size=3)
    config.parallel_config.data_parallel_index = rank
    config.parallel_config.reconfigure_for_independent_dp_rank()
    assert config.parallel_config.data_parallel_size == 1
    assert layout.replica_of(config.parallel_config) == (rank, 3)
    assert layout.refusal(config, groups(specs["full"])) == ""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_of_a_model_with_experts_is_one_too(model, specs, rank):
    """vLLM leaves its configuration as it is."""
    config = engine_config(model, data_parallel_size=3)
    config.parallel_config.data_parallel_index = config.parallel_config.data_parallel_rank = rank
    assert config.parallel_config.data_parallel_size == 3
    assert layout.replica_of(config.parallel_config) == (rank, 3)
    assert layout.refusal(config, groups(specs["full"])) == ""


@pytest.mark.parametrize(
    "field, value, why",
    [
        ("data_parallel_index", 1, "vLLM reports data parallel rank 1, but not the number of ranks"),
        (
            "prefill_context_parallel_size",
            2,
            "with prefill context parallelism, which ranks have whole pages after a step is unknown",
        ),
        ("enable_elastic_ep", True, "elastic expert parallelism, which changes the number of ranks, is not served"),
    ],
)
def test_other_kinds_of_parallelism_are_refused(config, specs, field, value, why):
    setattr(config.parallel_config, field, value)
    assert layout.refusal(config, groups(specs["full"])) == why


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"])
def test_ranks_that_share_a_prompt_are_served(config, specs, field):
    setattr(config.parallel_config, field, 2)
    assert layout.refusal(config, groups(specs["full"])) == ""


@pytest.mark.parametrize(("ranks", "sharded", "tokens"), [(1, True, 32), (2, True, 64), (4, True, 128), (4, False, 32)])
def test_with_decode_context_parallelism_blocks_are_as_long_as_vllm_says(config, ranks, sharded, tokens):
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    config.parallel_config.decode_context_parallel_size = ranks
    kv_cache_config = groups(spec("FullAttentionSpec", dcp_sharded=sharded))
    assert resolve_kv_cache_block_sizes(kv_cache_config, config) == (tokens, tokens)
    assert kv_groups.block_tokens(kv_cache_config, config.parallel_config) == (tokens,)
    assert kv_groups.scheduler_block(kv_cache_config, config.parallel_config) == tokens


def test_an_engine_whose_embeddings_come_from_elsewhere_is_refused(config, specs):
    from vllm.config import ECTransferConfig

    why = "embeddings of items may come from a source that kvtier cannot identify"
    config.ec_manager_config.encoder_cache_manager_cls = "acme.Cache"
    assert layout.refusal(config, groups(specs["full"])) == why
    config.ec_manager_config.encoder_cache_manager_cls = None
    config.ec_transfer_config = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
    assert layout.refusal(config, groups(specs["full"])) == why


@pytest.mark.parametrize("method", ["custom_class", "extract_hidden_states", "new"])
def test_drafts_that_may_leave_anything_in_the_cache_are_refused(model, specs, method):
    why = f"the KV that speculative decoding with {method} leaves is unknown"
    assert layout.refusal(speculating(model, method=method), groups(specs["full"])) == why


@pytest.mark.parametrize("kinds", ["full", "window", "full full", "full window", "full state"])
@pytest.mark.parametrize(
    "method, lookahead",
    [
        *((method, None) for method in ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")),
        *((method, 1) for method in ("eagle", "eagle3", "mtp", "dflash", "dspark")),
        ("draft_model", 0),
    ],
)
def test_other_drafts_are_served_whatever_the_layers_keep(model, specs, method, lookahead, kinds):
    """Also draft layers in a group of their own."""
    config = speculating(model, method=method)
    assert layout.refusal(config, groups(*(specs[kind] for kind in kinds.split()))) == ""
    draft = speculation.draft_model(config)
    assert (draft and draft.lookahead) == lookahead


def test_parallel_drafts_are_served(model, specs):
    config = speculating(model, method="eagle", parallel_drafting=True)
    assert layout.refusal(config, groups(specs["full"])) == ""


def test_mtp_modules_read_as_far_ahead_as_there_are_drafts(model, specs):
    """One draft a module, of three modules; but with states there is no boundary that has all it needs."""
    config = speculating(model, method="mtp", num_speculative_tokens=3, modules=3)
    assert speculation.draft_model(config).lookahead == 3
    assert layout.refusal(config, groups(specs["full"], specs["window"])) == ""
    why = "several MTP modules complete the KV after a recurrent state only once vLLM has released that state"
    assert layout.refusal(config, groups(specs["full"], specs["state"])) == why


def speculating(model, modules=1, **changes):
    """The model drafts for itself, with so many MTP modules."""
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = engine_config(model, speculative_config=drafting)
    config.speculative_config.draft_model_config = copy.deepcopy(config.model_config)
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = modules
    for field, value in changes.items():
        setattr(config.speculative_config, field, value)
    return config


def test_several_mtp_modules_are_refused_where_vllm_does_not_say_how_far_they_read(model, specs, monkeypatch):
    """Before 0.32."""
    config = speculating(model, method="mtp", modules=2)
    monkeypatch.delattr(type(config), "num_prefill_lookahead_tokens")
    why = "this vLLM does not report how many tokens its MTP modules read ahead"
    assert layout.refusal(config, groups(specs["full"])) == why
    config.speculative_config.num_speculative_tokens = 1
    assert layout.refusal(config, groups(specs["full"])) == ""
    assert speculation.draft_model(config).lookahead == 1


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_state_is_not_taken_while_drafts_may_still_be_rejected(config, specs, mode):
    """vLLM copies the state behind the last token that was right, after it has said that there is one to store."""
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

    state = dataclasses.replace(specs["state"], mamba_cache_mode=mode)
    tables = kv_groups.Tables.of(groups(specs["full"], state), config.parallel_config)
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = KVConnectorBlockState(
        {"drafts", "plain"}, lambda request_id: ([1, 2], [3, 4]), {each: [(1, 3, 32)] for each in ("drafts", "plain")}
    )
    output.scheduled_spec_decode_tokens = {"drafts": [7, 7]}
    steps = [ScheduledRequest(request_id, computed=30, scheduled=3) for request_id in ("drafts", "plain")]
    assert tables.states(output, steps) == {"plain": {32: {1: 3}}}


# -- engines with other ranks --------------------------------------------------------------------------------

KEYS = Elements(2, 16, 64, 0, 128, 256, 1)
BY_HEAD = attrs.evolve(
    make_layout((16 * 256 * 4,)).groups[0],
    structure=KVStructure.KEYS_AND_VALUES,
    dtype="float32",
    elements=(KEYS, attrs.evolve(KEYS, first=64)),
)


@pytest.mark.parametrize(
    ("group", "parallel", "why"),
    [
        ({}, {}, ""),
        ({}, {"pipeline_parallel_size": 2}, "its ranks divide more than the heads: layers or tokens"),
        ({}, {"decode_context_parallel_size": 2}, "its ranks divide more than the heads: layers or tokens"),
        ({}, {"tensor_parallel_size": 2}, "2 heads are not divided among its ranks"),
        ({"kind": KVKind.SLIDING_WINDOW, "reach": 64}, {}, "group 0 needs sliding window of 64"),
        ({"elements": ()}, {}, "where the heads lie in the pages of group 0 is unknown"),
        ({"structure": KVStructure.MLA_LATENT, "elements": ()}, {}, ""),
        (
            {"structure": KVStructure.MLA_LATENT, "elements": ()},
            {"tensor_parallel_size": 2},
            "its ranks have latents of their own",
        ),
    ],
)
def test_ranks_count_unless_each_head_is_on_one_of_them(config, specs, group, parallel, why):
    for field, value in parallel.items():
        setattr(config.parallel_config, field, value)
    assert kv_groups.own_ranks(config, groups(specs["full"]), [attrs.evolve(BY_HEAD, **group)]) == why


def test_ranks_with_draft_layers_count(model, specs):
    drafting = engine_config(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    why = kv_groups.own_ranks(drafting, groups(specs["full"]), [BY_HEAD])
    assert why == "layers of drafts may be divided in another way"


def test_ranks_count_beside_layers_that_are_not_served(config, specs):
    why = kv_groups.own_ranks(config, groups(specs["full"], specs["scratch"]), [BY_HEAD])
    assert why == "it keeps more than the KV of prompts"


@pytest.mark.parametrize(
    ("ranks", "server", "why"),
    [
        ("own", None, "ranks: own"),
        ("any", None, ""),
        ("any", "unix:/run/kvtier.sock", "a server keeps KV apart by the ranks of its engines"),
    ],
)
def test_ranks_count_unless_it_was_asked(config, specs, ranks, server, why):
    asked = StackConfig((), identity=IdentityConfig(ranks=ranks), server=server)
    assert layout._own_ranks(config, groups(specs["full"]), asked, [BY_HEAD]) == why


# -- the order of layers in a frame --------------------------------------------------------------------------


def laid_out(page_layout, names, blocks=8):
    """The tensors of layers as vLLM 0.32 makes them, all in one allocation."""
    from vllm.v1 import kv_cache_interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    each = spec("FullAttentionSpec")
    order = KVCacheLayout[page_layout]
    layer_stride, block_stride, *_ = kv_cache_interface.compute_layout_strides(each, blocks, len(names), order)
    size = each.page_size_bytes * blocks * len(names)
    placed = kv_cache_interface.KVCacheTensor(size, names, layer_stride, block_stride)
    raw = torch.zeros(size, dtype=torch.int8)
    views = kv_cache_interface.create_kv_cache_views(raw, each, blocks, order, placed)
    engine = dataclasses.replace(groups(each), num_blocks=blocks)
    return engine, dict(zip(names, views, strict=True))


NAMES = [f"model.layers.{number}.attn" for number in range(12)]


@pytest.mark.parametrize("page_layout", ["BLHNC", "BLNHC"])
def test_adjacent_layers_are_in_that_order(config, page_layout):
    """So that a mover copies a block of all of them at once; by name, 10 would come before 2."""
    engine, caches = laid_out(page_layout, NAMES)
    runs, _ = layout._pages(config, engine, caches)
    page = runs[0].nbytes
    assert [run.base - runs[0].base for run in runs] == [number * page for number in range(len(NAMES))]
    assert {run.stride for run in runs} == {len(NAMES) * page}
    assert layout._names(engine, caches) == NAMES


@pytest.mark.parametrize("page_layout", ["LBHNC", "LBNHC"])
def test_other_layers_are_in_the_order_of_their_names(page_layout):
    """Wherever they lie: before 0.32 they may be allocated one by one, elsewhere in every start."""
    engine, caches = laid_out(page_layout, NAMES)
    assert layout._names(engine, caches) == sorted(NAMES)


def test_the_order_of_layers_in_a_frame_is_reported():
    """It is part of the namespace: engines of one layout whose layers lie in another order share no frames."""
    there, back = (laid_out("BLNHC", names) for names in (NAMES, NAMES[::-1]))
    assert layout._names(*there) == layout._names(*back)[::-1]


@pytest.mark.parametrize("page_layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_pages_come_back_however_vllm_lays_them_out(config, page_layout, chunk_blocks):
    engine, caches = laid_out(page_layout, NAMES)
    runs, _ = layout._pages(config, engine, caches)
    chunks = make_layout([run.nbytes for run in runs], chunk_blocks)
    table = PagedKVCache(tuple(runs), engine.num_blocks, "cpu", 0, chunks)
    slots = memoryview(bytearray(2 * chunks.frame_nbytes))
    mover = HostMover(table, slots, chunks.frame_nbytes, PlainCopier)
    try:
        assert try_copies(mover, table, [caches], slots=[1]) == ""
    finally:
        mover.close()


def test_the_node_of_a_gpu_is_that_of_its_pci_address(monkeypatch):
    asked = []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=2)
    monkeypatch.setattr(numa, "node_of_gpu", lambda *address: asked.append(address) or 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert (layout._numa_node(torch.device("cuda:0")), asked) == (1, [(0, 0x17, 2)])
    del gpu.pci_device_id  # an older torch
    assert layout._numa_node(torch.device("cuda:0")) is None
