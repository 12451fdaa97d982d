"""What the ranks of an engine report, put together."""

from __future__ import annotations

import attrs
import pytest

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.engine.start.ranks import Ranks
from kvtier_core.layouts import Elements, KVStructure
from kvtier_testing.samples import make_group, make_layout

GROUP = attrs.evolve(make_group((100, 100)), dtype="float32", structure=KVStructure.KEYS_AND_VALUES)
REPORT = WorkerReport("cpu", (GROUP,), (("layers", "a b"), ("page layout", "LBHNC")), failure_policy="recompute")
LAST = attrs.evolve(
    REPORT, groups=(attrs.evolve(GROUP, page_nbytes=(50,)),), facts=(("layers", "c"), ("page layout", "LBHNC"))
)


def group(**changes):
    return attrs.evolve(LAST, groups=(attrs.evolve(LAST.groups[0], **changes),))


def test_the_report_of_one_stage_is_that_of_each_rank():
    ranks = Ranks([REPORT, REPORT])
    assert ranks.disagreement() == ""
    assert ranks.as_one() == REPORT


def test_stages_have_layers_of_their_own():
    ranks = Ranks([REPORT, REPORT, LAST, LAST], stages=2)
    assert ranks.disagreement() == ""
    whole = ranks.as_one()
    assert whole.groups == (attrs.evolve(GROUP, page_nbytes=(100, 100, 50)),)
    assert whole.facts == (("layers", "a b | c"), ("page layout", "LBHNC"))


def test_ranks_of_a_stage_have_the_same():
    assert Ranks([REPORT, LAST]).disagreement() == "the pages of the workers differ"
    assert Ranks([REPORT, LAST, REPORT, LAST], stages=2).disagreement() == "the pages of the workers differ"


@pytest.mark.parametrize(
    "other",
    [
        attrs.evolve(LAST, device="cuda"),
        attrs.evolve(LAST, failure_policy="fail"),
        attrs.evolve(LAST, groups=()),
        group(block_tokens=32),
        group(name="another"),
    ],
)
def test_stages_differ_in_nothing_but_their_layers(other):
    assert Ranks([REPORT, other], stages=2).disagreement() == (
        "the pages of the pipeline stages differ in more than their layers"
    )


def test_a_refusal_of_any_rank_is_reported():
    assert Ranks([REPORT, WorkerReport("", (), (), "a later stage has states")], stages=2).disagreement() == (
        "a later stage has states"
    )


def test_a_fact_of_some_stages_is_not_a_fact_of_all():
    """Kinds of numbers that differ from stage to stage are opaque, and as many ranks are alike as are in all stages."""
    whole = Ranks([attrs.evolve(REPORT, replicas=4), attrs.evolve(group(dtype="uint8"), replicas=2)], stages=2).as_one()
    assert (whole.groups[0].dtype, whole.groups[0].structure) == ("float32 uint8", KVStructure.KEYS_AND_VALUES)
    assert whole.replicas == 2
    whole = Ranks([REPORT, group(structure=KVStructure.MLA_LATENT)], stages=2).as_one()
    assert whole.groups[0].structure is KVStructure.OPAQUE


def test_the_places_of_keys_and_values_are_known_if_all_stages_agree():
    keys, values = Elements(1, 16, 4, 0, 8, 8, 1), Elements(1, 16, 4, 4, 8, 8, 1)
    known = {"elements": (keys, values)}
    first = attrs.evolve(REPORT, groups=(attrs.evolve(GROUP, depths=(0, 1), **known),))
    whole = Ranks([first, group(depths=(2,), **known)], stages=2).as_one()
    assert (whole.groups[0].elements, whole.groups[0].depths) == ((keys, values), (0, 1, 2))
    for other in (group(), group(elements=(values, keys))):
        whole = Ranks([first, other], stages=2).as_one()
        assert (whole.groups[0].elements, whole.groups[0].depths) == ((), ())
    without_layers = group(page_nbytes=())
    assert Ranks([first, without_layers], stages=2).as_one().groups[0].elements == (keys, values)


def test_the_layout_has_the_shards_of_all_ranks():
    stack = {"version": 1, "chunk_tokens": 32, "tiers": [{"type": "heap", "capacity": "1MiB"}]}
    config = load_config(stack, Registry.discover())
    alike = [attrs.evolve(each, replicas=2) for each in (REPORT, REPORT, LAST, LAST)]
    _, layout = Ranks(alike, stages=2).in_chunks(config)
    assert (layout.tokens, layout.ranks, layout.shards, layout.stages) == (32, 4, 2, ((2,), (1,)))
    assert layout.payload_nbytes == 2 * (100 + 100 + 50)
    _, plain = Ranks([REPORT, REPORT]).in_chunks(config)
    assert (plain.ranks, plain.shards, plain.stages) == (2, 2, ())


def on_nodes(*nodes, replicas=1):
    return Ranks([attrs.evolve(REPORT, numa_node=node, replicas=replicas) for node in nodes])


def test_each_shard_is_on_the_node_of_those_who_copy_it():
    assert on_nodes(0, 1).disagreement() == "", "devices of one stage may be on several nodes"
    assert on_nodes(0, 0, None, 1).numa_nodes(make_layout(ranks=4)) == (0, 0, None, 1)
    shared = make_layout(ranks=6, replicas=2)
    assert on_nodes(1, 1, 0, 1, None, None, replicas=2).numa_nodes(shared) == (1, None, None)


def test_frames_of_any_ranks_have_all_layers_in_each_shard():
    stack = {"version": 1, "chunk_tokens": 32, "tiers": [{"type": "heap", "capacity": "1MiB"}]}
    config = load_config(stack, Registry.discover())
    divided = attrs.evolve(REPORT, own_ranks="")
    assert Ranks([divided, divided]).in_chunks(config)[1].any_ranks
    assert not Ranks([REPORT, REPORT]).in_chunks(config)[1].any_ranks
    assert Ranks([divided, REPORT]).disagreement()
    with pytest.raises(ValueError, match="all layers and all tokens in each shard"):
        Ranks([divided, attrs.evolve(LAST, own_ranks="")], stages=2).in_chunks(config)
