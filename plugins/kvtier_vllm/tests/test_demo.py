"""The demo fails if an answer with kvtier is not that of vLLM alone, or nothing was remembered."""

from __future__ import annotations

import os
import re

import attrs
import demo
import pytest
from demo_engine import Answer
from source_copy import ROOT

COMPUTED = Answer(
    question=0,
    prompt=300,
    reused=0,
    sources={},
    seconds=1.0,
    tokens=[7, 8],
    logprobs=[-0.5, -0.25],
    text="seven eight",
    complete=True,
)
#: vLLM's own cache splits the prompt, and what it computes is rounded otherwise.
REUSED = attrs.evolve(COMPUTED, reused=256, logprobs=[-0.5, -0.250001])
ALONE = [COMPUTED, REUSED]

STORED = COMPUTED
FROM_MEMORY = attrs.evolve(REUSED, sources={"cpu": 256})
FROM_DISK = attrs.evolve(REUSED, sources={"disk": 256})


def test_equal_answers_pass(capsys):
    assert demo.judge(ALONE, [STORED, FROM_MEMORY, FROM_DISK]) == 0
    assert "all 3 answers are the same, token for token (6 tokens)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"tokens": [7, 9], "text": "seven nine"}, id="another token"),
        pytest.param({"tokens": [7], "logprobs": [-0.5]}, id="a token less"),
        pytest.param({"logprobs": [-0.5, -0.25]}, id="a log-probability as if computed from scratch"),
        pytest.param({"logprobs": [-0.5, float("nan")]}, id="no number"),
        pytest.param({"reused": 128, "sources": {"disk": 128}}, id="less remembered than vLLM's own cache does"),
    ],
)
def test_another_answer_fails(wrong, capsys):
    assert demo.judge(ALONE, [STORED, FROM_MEMORY, attrs.evolve(FROM_DISK, **wrong)]) == 1
    assert "FAILED: 'What does an LLM engine forget?', " in capsys.readouterr().out


def test_an_answer_that_vllms_own_cache_changes_fails():
    other = {"tokens": [7, 9], "text": "seven nine"}
    changed = [attrs.evolve(each, **other) for each in (REUSED, FROM_MEMORY, FROM_DISK)]
    assert demo.judge([COMPUTED, changed[0]], changed[1:]) == 1


@pytest.mark.parametrize(("served", "missing"), [(FROM_MEMORY, "disk"), (FROM_DISK, "memory")])
def test_the_demo_fails_if_nothing_is_remembered(served, missing, capsys):
    assert demo.judge(ALONE, [STORED, served]) == 1
    assert f"FAILED: nothing came from {missing}" in capsys.readouterr().out


def test_without_its_model_it_ends_with_a_sentence(monkeypatch):
    def checkpoint():
        raise demo.real_model.ModelUnavailable("pip could not download it: no index")

    monkeypatch.setattr(demo.real_model, "checkpoint", checkpoint)
    with pytest.raises(SystemExit, match=r"not available: pip could not download it: no index\. .*--model FOLDER"):
        demo.main(None)


def test_the_tutorial_shows_the_tokens_of_its_prompt():
    """Of its model, which `make demo` has made."""
    from transformers import AutoTokenizer

    made = sorted(demo.real_model.BUILD.glob("smollm2-*"))
    if not made and "KVTIER_CI" not in os.environ:
        pytest.skip("there is no checkpoint: make demo")
    page = (ROOT / "docs/tutorial.md").read_text()
    (file, end) = re.search(r'prompt = open\("(.*)"\)\.read\(\) \+ "\\n(.*)"', page).groups()
    prompt = AutoTokenizer.from_pretrained(made[-1])(f"{(ROOT / file).read_text()}\n{end}")["input_ids"]
    chunks = (len(prompt) - 1) // 128
    assert "chunk_tokens: auto -> 128" in page
    miss, hit = (line for line in page.splitlines() if " from kvtier" in line)
    tokens, loaded = len(prompt), 128 * chunks
    assert miss.endswith(f": {tokens} tokens: 0 from kvtier, {tokens} computed (not stored)")
    assert hit.endswith(f": {tokens} tokens: {loaded} from kvtier (disk {loaded}), {tokens - loaded} computed")
    assert f"{chunks} chunks of 128 tokens" in page and f"{len(prompt) - 128 * chunks} tokens were computed" in page
