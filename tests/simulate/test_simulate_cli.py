"""`kvtier simulate` and `kvtier plan`, run as users run them."""

from __future__ import annotations

import io
import json
import random
import struct
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.simulate.bar import Bar
from kvtier_core.simulate.stacks import all_policies
from kvtier_core.simulate.traces import read_trace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a trace: talks of many users, who come back or do not."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    talks = [[0, user + 1] for user in range(30)]
    lines = []
    for at in range(300):
        talk = talks[rng.randrange(30)]
        talk += [1000 * at + i for i in range(1, rng.randrange(2, 5))]
        lines.append({"timestamp": 100 * at, "input_length": 512 * len(talk) - 100, "hash_ids": list(talk)})
        if len(talk) > 12:
            del talk[1:]
            talk.append(1000 * at + 500)
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def table(text, first="capacity"):
    """Rows as dicts, by the header; columns are two spaces apart."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    header = [word for word in lines[start].replace("  ", "\0").split("\0") if word.strip()]
    rows = []
    for line in lines[start + 1 :]:
        if not line:
            break
        rows.append(dict(zip(map(str.strip, header), _cells(line), strict=False)))
    return rows


def _cells(line):
    return [cell.strip() for cell in line.replace("  ", "\0").split("\0") if cell.strip()]


def test_every_policy_and_the_bound_at_every_capacity(folder, capsys):
    assert main(["simulate", "trace.jsonl", "--capacity", "5%,20%"]) == 0
    told = capsys.readouterr()
    rows = table(told.out)
    names = {"min", *all_policies(Registry.discover())}
    assert {(row["capacity"], row["policy"]) for row in rows} == {(c, n) for c in ("5%", "20%") for n in names}
    bounds = {row["capacity"]: row for row in rows if row["policy"] == "min"}
    hits = [float(row["hits"][:-1]) for row in rows]
    assert hits[: len(names)] == sorted(hits[: len(names)], reverse=True), "the best are told first"
    for row in rows:
        bound = bounds[row["capacity"]]
        assert float(row["hits"][:-1]) <= float(bound["hits"][:-1])
        assert float(row["of min"][:-1]) == pytest.approx(
            100 * float(row["hits"][:-1]) / float(bound["hits"][:-1]), abs=0.2
        )
    assert told.out.startswith("trace: 300 prompts in 0 min, ")
    assert told.err == "", "a bar was drawn where nobody looks"


def test_a_stack_of_two_tiers(folder, capsys):
    assert main(["simulate", "trace.jsonl", "--capacity", "3%+20%", "--policy", "lru,mru+lru,min"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows[0]["policy"] == "min" and {row["policy"] for row in rows} == {"min", "lru", "mru+lru"}
    for row in rows:
        parts = float(row["cpu"][:-1]) + float(row["disk"][:-1])
        assert float(row["hits"][:-1]) == pytest.approx(parts, abs=0.02)
        assert float(row["disk"][:-1]) > 0


def test_the_stack_of_a_file(folder, capsys):
    (folder / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: cpu, capacity: 1GiB}\n"
        "  - {type: disk, path: /nowhere, capacity: 8GiB, eviction: fifo}\n"
    )
    assert main(["simulate", "trace.jsonl", "--config", "kvtier.yaml"]) == 0
    assert [row["policy"] for row in table(capsys.readouterr().out)] == ["min", "gittins+fifo"]
    assert main(["simulate", "trace.jsonl", "--config", "kvtier.yaml", "--policy", "lru,min,mru"]) == 0
    assert {row["policy"] for row in table(capsys.readouterr().out)} == {"min", "lru", "mru"}


def test_packing_finds_more_in_the_same_memory(folder, capsys):
    def hits(*options):
        assert main(["simulate", "trace.jsonl", "--capacity", "3%", "--policy", "lru", *options]) == 0
        return float(table(capsys.readouterr().out)[0]["hits"][:-1])

    assert hits("--packing", "auto") > hits()
    assert main(["plan", "trace.jsonl", "--ram", "2GiB", "--policy", "lru", "--packing", "auto"]) == 0
    assert "eviction: lru, packing: auto}" in capsys.readouterr().out


def test_chunks_of_another_size_than_the_files_are_told(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nchunk_tokens: 256\ntiers:\n  - {type: heap, capacity: 1GiB}\n")
    assert main(["simulate", "trace.jsonl", "--config", "kvtier.yaml"]) == 0
    assert "kvtier.yaml has chunks of 256 tokens; simulated are the trace's, of 512\n" in capsys.readouterr().out


def test_chunks_whose_size_only_an_engine_knows_are_the_traces(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nchunk_tokens: auto\ntiers:\n  - {type: heap, capacity: 1GiB}\n")
    assert main(["simulate", "trace.jsonl", "--config", "kvtier.yaml"]) == 0
    told = capsys.readouterr().out
    assert "distinct chunks of 512 tokens" in told and "kvtier.yaml has chunks" not in told


def test_chunks_that_can_be_put_together_are(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nchunk_tokens: 1024\ntiers:\n  - {type: heap, capacity: 1GiB}\n")
    assert main(["simulate", "trace.jsonl", "--config", "kvtier.yaml"]) == 0
    told = capsys.readouterr().out
    assert "distinct chunks of 1024 tokens" in told and "simulated are" not in told


def test_slower_reads_make_longer_prefills(folder, capsys):
    def mean(*options):
        assert main(["simulate", "trace.jsonl", "--capacity", "20%", "--policy", "lru", *options]) == 0
        (row,) = table(capsys.readouterr().out)
        return int(row["mean"].removesuffix(" ms"))

    usual = mean()
    assert mean("--speed", "cpu=1") > usual
    assert mean("--speed", "cpu=20,100ms") == pytest.approx(usual + 100, abs=10)
    assert mean("--prefill", "4000") > 1.5 * usual
    assert mean("--bytes-per-token", "1MiB") > usual


def test_a_picture_has_each_curve(folder, capsys):
    command = ["simulate", "trace.jsonl", "--capacity", "20%,5%", "--policy", "lru,fifo,min", "--plot"]
    assert main([*command, "plot.svg"]) == 0
    drawn = ElementTree.parse("plot.svg")
    texts = ["".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    rows = table(capsys.readouterr().out)
    for row in rows:
        if row["capacity"] == "20%":
            name = "optimum" if row["policy"] == "min" else row["policy"]
            assert any(text.startswith(f"{name}  ") for text in texts)
    assert [text for text in texts if text in ("5%", "20%")][-2:] == ["5%", "20%"], "capacities rise"


def test_a_picture_of_the_bound_alone(folder):
    assert main(["simulate", "trace.jsonl", "--policy", "min", "--plot", "plot.svg"]) == 0
    assert "optimum" in (folder / "plot.svg").read_text()


def test_a_png_is_the_same_picture(folder):
    command = ["simulate", "trace.jsonl", "--capacity", "5%,20%", "--policy", "lru", "--plot", "plot.png"]
    assert main(command) == 0
    header = (folder / "plot.png").read_bytes()[:24]
    assert (header[:8], header[16:]) == (b"\x89PNG\r\n\x1a\n", struct.pack(">II", 2400, 1440))


def test_a_png_needs_a_converter(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert main(["simulate", "trace.jsonl", "--plot", "plot.png"]) == 2
    assert capsys.readouterr().err == (
        "--plot: plot.png: resvg-py is not installed; pip install 'kvtier[plot]', or write an .svg\n"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["absent.jsonl"], "absent.jsonl: $: cannot be read: No such file or directory"),
        (["trace.jsonl", "--policy", "lur"], "--policy: lur: no eviction policy 'lur' is installed (have: "),
        (["trace.jsonl", "--policy", "lru+lru"], "--policy: lru+lru: 2 policies for one tier"),
        (["trace.jsonl", "--capacity", "1+1"], "--capacity: 1: '1' is not a size; write a whole number and B"),
        (["trace.jsonl", "--capacity", "1%+1%+1%+1%"], "--capacity: 1%+1%+1%+1%: 4 tiers; at most 3 can be told apart"),
        (["trace.jsonl", "--capacity", "1MiB"], "StackConfig: $.tiers[0].capacity: 1MiB holds no chunk: one is 64.1M"),
        (["trace.jsonl", "--bytes-per-token", "9"], "--bytes-per-token: 9: '9' is not a size"),
        (["trace.jsonl", "--bytes-per-token", "0B"], "--bytes-per-token: 0B: must be positive"),
        (["trace.jsonl", "--prefill", "0"], "--prefill: 0: must be positive"),
        (["trace.jsonl", "--speed", "disk"], "--speed: disk: could not convert string to float: ''; write it as"),
        (["trace.jsonl", "--speed", "disk=3,4"], "--speed: disk=3,4: '4' is not a length of time"),
        (["trace.jsonl", "--speed", "dusk=3"], "--speed: dusk: there is no such tier; there are: cpu"),
        (["trace.jsonl", "--speed", "cpu=0"], "--speed: cpu=0: a tier and a speed are needed"),
        (["trace.jsonl", "--chunk-tokens", "64"], "trace.jsonl:1: $.hash_ids: "),
        (["trace.jsonl", "--config", "absent.yaml"], "absent.yaml: $: cannot be read"),
        (["trace.jsonl", "--plot", "plot.gif"], "--plot: plot.gif: a picture must be .svg or .png"),
        (["trace.jsonl", "--capacity", "5%", "--plot", "plot.svg"], "--plot: plot.svg: one capacity makes no curve; "),
        (["trace.jsonl", "--capacity", "1GiB,1024MiB", "--plot", "p.svg"], "--plot: p.svg: one capacity makes no "),
        (["trace.jsonl", "--plot", "absent/plot.svg"], "--plot: absent/plot.svg: there is no folder absent"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_told(folder, capsys, options, told):
    assert main(["simulate", *options]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err[: len(told)]) == ("", told)


def test_a_plan_is_the_least_of_what_was_tried_and_can_be_written_down(folder, capsys):
    command = ["plan", "trace.jsonl", "--ram", "1GiB", "--ssd", "8GiB", "--policy", "lru,mru", "--speed"]
    assert main([*command, "dusk=5"]) == 2
    assert capsys.readouterr().err == "--speed: dusk: there is no such tier; there are: cpu, disk\n"
    assert main([*command, "disk=5"]) == 0
    told = capsys.readouterr().out
    rows = table(told)
    means = [int(row["mean"].removesuffix(" ms")) for row in rows]
    assert means == sorted(means)
    assert {row["policy"] for row in rows if row["capacity"] == "1GiB+8GiB"} >= {"lru+lru", "mru+mru"}
    assert {"512MiB+8GiB", "1GiB+4GiB", "1GiB"} <= {row["capacity"] for row in rows}
    yaml = [line[4:] for line in told.splitlines() if line.startswith("    ")]
    (folder / "kvtier.yaml").write_text("\n".join(["version: 1", *yaml]))
    config = load_config(folder / "kvtier.yaml", Registry.discover())
    assert "+".join(tier.eviction.type for tier in config.tiers) == rows[0]["policy"]
    assert "1GiB would take " in told


def test_a_plan_prefers_the_default_policy_where_others_are_as_good(folder, capsys):
    assert main(["plan", "trace.jsonl", "--ram", "1TiB", "--ssd", "1TiB", "--policy", "lru,gittins,mru"]) == 0
    told = capsys.readouterr().out
    assert "eviction: gittins" in told and "eviction: lru" not in told
    assert "As good: " in told


def test_a_plan_for_memory_alone(folder, capsys):
    assert main(["plan", "trace.jsonl", "--ram", "10%", "--policy", "lru"]) == 0
    assert {row["policy"] for row in table(capsys.readouterr().out)} == {"lru"}


def test_a_plan_needs_a_budget(folder, capsys):
    assert main(["plan", "trace.jsonl", "--ram", "many"]) == 2
    assert capsys.readouterr().err.startswith("--ram: many: 'many' is not a size")


def test_a_bar_is_drawn_on_a_terminal_and_gone_in_the_end():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with Bar(2, terminal) as bar:
        bar.label = "lru at 5%"
        bar.tick()
    assert "50%  lru at 5%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")


def test_the_trace_of_these_tests_is_one(folder):
    trace = read_trace("trace.jsonl")
    assert trace.distinct < trace.accesses
