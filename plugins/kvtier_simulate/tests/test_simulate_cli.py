"""`kvtier simulate` and `kvtier plan`, run as users run them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.types import Nbytes, size
from kvtier_simulate.bar import Bar
from kvtier_simulate.optimum import Optimum
from kvtier_simulate.plot import Curve, Picture
from kvtier_simulate.stacks import all_policies
from kvtier_simulate.traces import read_trace


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


def test_a_capacity_without_end_takes_no_memory(folder, capsys):
    assert main(["simulate", "trace.jsonl", "--capacity", "1000000TiB,100%", "--policy", "lru,min"]) == 0
    rows = table(capsys.readouterr().out)
    assert [row["capacity"] for row in rows] == ["1000000TiB"] * 2 + ["100%"] * 2
    assert len({(row["hits"], row["into cpu"]) for row in rows if row["policy"] == "lru"}) == 1


def test_the_bound_is_computed_once_a_capacity(folder, monkeypatch):
    asked = []
    hits = Optimum.hits
    monkeypatch.setattr(Optimum, "hits", lambda self, capacity: asked.append(capacity) or hits(self, capacity))
    assert main(["simulate", "trace.jsonl", "--capacity", "5%,20%", "--policy", "lru,fifo,mru,min"]) == 0
    assert len(asked) == 2


def test_dropped_lines_are_reported(folder, capsys):
    with (folder / "trace.jsonl").open("a") as file:
        file.write('{"timestamp": 12, "inp')
    for command in (["simulate", "trace.jsonl", "--policy", "lru"], ["plan", "trace.jsonl", "--ram", "5%"]):
        assert main(command) == 0
        assert "one line was dropped: trace.jsonl:301 ends before its request does\n" in capsys.readouterr().out


def test_a_stack_of_two_tiers(folder, capsys):
    assert main(["simulate", "trace.jsonl", "--capacity", "3%+20%", "--policy", "lru,mru+lru,min"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows[0]["policy"] == "min" and {row["policy"] for row in rows} == {"min", "lru", "mru+lru"}
    for row in rows:
        parts = float(row["cpu"][:-1]) + float(row["disk"][:-1])
        assert float(row["hits"][:-1]) == pytest.approx(parts, abs=0.02)
        assert float(row["disk"][:-1]) > 0


def test_a_tier_without_a_capacity_cannot_be_simulated(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\ntiers:\n  - {type: cpu, capacity: 1GiB}\n  - {type: redis}\n")
    assert main(["simulate", "trace.jsonl", "--config", "kvtier.yaml"]) == 2
    assert (
        "kvtier.yaml:4: $.tiers[1]: no capacity limit, so its contents cannot be simulated" in capsys.readouterr().err
    )


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


def test_chunks_of_another_size_than_the_files_are_reported(folder, capsys):
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


def test_a_tier_writes_no_more_than_its_limit(folder, capsys):
    """The trace lasts half a minute."""
    command = ["simulate", "trace.jsonl", "--capacity", "3%+20%", "--policy", "lru,min"]
    assert main([*command, "--json"]) == 0
    without = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    assert without["lru"]["writes_per_day"] is None
    limits = [int(without["lru"]["written"]["disk"] * 2880 * part) for part in (0.2, 0.5)]
    command += ["--writes", ",".join(f"{limit}B" for limit in limits)]
    assert main([*command, "--json"]) == 0
    rows = {row["writes_per_day"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == {None, *limits}
    assert rows[None] == without["min"], "the optimum knows no limit"
    for limit in limits:
        assert limit / 2880 / 2 < rows[limit]["written"]["disk"] <= limit / 2880
        assert rows[limit]["hit_rate"] < without["lru"]["hit_rate"]
    assert main(command) == 0
    told = table(capsys.readouterr().out)
    assert {row["writes a day"] for row in told} == {"any", *(str(Nbytes(limit)) for limit in limits)}


def test_curves_over_limits_of_writes(folder):
    limits = ["--writes", "900GiB,100GiB", "--plot", "plot.svg"]
    assert main(["simulate", "trace.jsonl", "--capacity", "3%+20%", "--policy", "lru,fifo,min", *limits]) == 0
    texts = [each.text for each in ElementTree.parse("plot.svg").iter(f"{SVG}text")]
    assert [text for text in texts if text in ("100GiB", "900GiB")] == ["100GiB", "900GiB"]
    assert "bytes that may be written to each store tier, on a logarithmic scale" in texts
    assert all(any(text.startswith(f"{name}  ") for text in texts) for name in ("lru", "fifo", "optimum"))


SVG = "{http://www.w3.org/2000/svg}"


def drawn(rates, ticks=None):
    """A picture of policies with these rates at 1, 2, 5 and 10 %, below an optimum of 96 %."""
    sizes = (1.0, 2.0, 5.0, 10.0)
    curves = tuple(Curve(name, each) for name, each in rates.items())
    ticks = ticks or tuple((f"{size:g}%", "GiB") for size in sizes)
    return ElementTree.fromstring(
        Picture("title", "subtitle", "capacity", sizes, ticks, curves, Curve("optimum", (0.96,) * 4)).svg()
    )


def colour_of(picture, name):
    (colour,) = {each.get("fill") for each in picture.iter(f"{SVG}text") if each.text.startswith(f"{name}  ")}
    return colour


def test_a_policy_has_the_same_colour_in_each_picture():
    one = drawn({"lru": (0.1,) * 4, "mine": (0.2,) * 4, "gittins": (0.3,) * 4})
    other = drawn({"gittins": (0.4,) * 4, "fifo": (0.2,) * 4, "mine": (0.1,) * 4, "lru": (0.2,) * 4})
    for name in ("lru", "gittins", "mine"):
        assert colour_of(one, name) == colour_of(other, name)
    assert len({colour_of(other, name) for name in ("lru", "gittins", "mine", "fifo")}) == 4


def test_labels_do_not_overprint_however_many_curves_there_are():
    picture = drawn({f"policy{i}": (0.1, 0.2, 0.3, 0.5) for i in range(40)})
    heights = sorted(float(each.get("y")) for each in picture.iter(f"{SVG}text") if "  " in each.text)
    assert len(heights) == 41 and min(b - a for a, b in itertools.pairwise(heights)) > 20.9
    assert heights[0] > 0 and heights[-1] < float(picture.get("height"))


def test_capacities_that_are_close_are_labelled_without_overprinting():
    many = tuple(("123456GiB" + "0" * 10, "12.345%") for _ in range(4))
    told = [each for each in drawn({"lru": (0.1,) * 4}, many).iter(f"{SVG}text") if each.text == many[0][0]]
    places = [float(each.get("x")) for each in told]
    assert len(places) > 1 and min(b - a for a, b in itertools.pairwise(places)) >= 19 * 10


def test_curves_that_collapse_are_drawn_once_more():
    close = {"lru": (0.5, 0.93, 0.95, 0.957), "arc": (0.4, 0.94, 0.951, 0.956), "fifo": (0.3, 0.92, 0.95, 0.951)}
    apart = {"lru": (0.5, 0.6, 0.7, 0.8), "arc": (0.4, 0.5, 0.5, 0.6), "fifo": (0.3, 0.3, 0.4, 0.4)}

    def texts(rates):
        return [each.text for each in drawn(rates).iter(f"{SVG}text")]

    assert "the same, where curves lie close" in texts(close) and "the same, where curves lie close" not in texts(apart)
    assert texts(close).count("1%") == 1 and texts(close).count("2%") == 2, "from where they collapse on"
    assert sum(text.startswith("lru  ") for text in texts({**close, "mru": (0.1,) * 4})) == 2
    assert sum(text.startswith("mru  ") for text in texts({**close, "mru": (0.1,) * 4})) == 1


def test_the_axis_has_bytes_beside_shares(folder):
    assert main(["simulate", "trace.jsonl", "--policy", "lru", "--capacity", "4GiB,20%", "--plot", "plot.svg"]) == 0
    texts = [each.text for each in ElementTree.parse("plot.svg").iter(f"{SVG}text")]
    told = texts[texts.index("4GiB") :]
    assert told[1].endswith("%") and told[3].endswith("GiB") and told[4].startswith("capacity, on a logarithmic scale")


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
        (["trace.jsonl", "--capacity", "1%+1%+1%+1%"], "--capacity: 1%+1%+1%+1%: 4 tiers; at most 3 are possible"),
        (["trace.jsonl", "--capacity", "1MiB"], "StackConfig: $.tiers[0].capacity: 1MiB is smaller than one chunk ("),
        (["trace.jsonl", "--capacity", "0%"], "--capacity: 0%: a share must be more than 0%; write 5%"),
        (["trace.jsonl", "--chunk-tokens", "0"], "--chunk-tokens: 0: must be positive"),
        (["trace.jsonl", "--bytes-per-token", "9"], "--bytes-per-token: 9: '9' is not a size"),
        (["trace.jsonl", "--bytes-per-token", "0B"], "--bytes-per-token: 0B: must be positive"),
        (["trace.jsonl", "--prefill", "0"], "--prefill: 0: must be positive"),
        (["trace.jsonl", "--speed", "disk"], "--speed: disk: could not convert string to float: ''; write it as"),
        (["trace.jsonl", "--speed", "disk=3,4"], "--speed: disk=3,4: '4' is not a duration"),
        (["trace.jsonl", "--speed", "dusk=3"], "--speed: dusk: no such tier; tiers: cpu"),
        (["trace.jsonl", "--speed", "cpu=0"], "--speed: cpu=0: it needs a tier and a speed"),
        (["trace.jsonl", "--chunk-tokens", "64"], "trace.jsonl:1: $.hash_ids: "),
        (["trace.jsonl", "--config", "absent.yaml"], "absent.yaml: $: cannot be read"),
        (["trace.jsonl", "--writes", "9"], "--writes: 9: '9' is not a size"),
        (["trace.jsonl", "--writes", "0B"], "--writes: 0B: must be positive"),
        (["trace.jsonl", "--writes", "1TiB"], "--writes: 1TiB: memory has no limit; give two tiers: 1%+10%"),
        (["trace.jsonl", "--capacity", "1%+5%,1%+9%", "--writes", "1TiB,2TiB", "--plot", "p.svg"], "--plot: p.svg: "),
        (["trace.jsonl", "--plot", "plot.gif"], "--plot: plot.gif: a picture must be .svg or .png"),
        (["trace.jsonl", "--capacity", "5%", "--plot", "plot.svg"], "--plot: plot.svg: one capacity does not make a "),
        (["trace.jsonl", "--capacity", "1GiB,1024MiB", "--plot", "p.svg"], "--plot: p.svg: one capacity does not "),
        (["trace.jsonl", "--plot", "absent/plot.svg"], "--plot: absent/plot.svg: folder absent does not exist"),
    ],
)  # fmt: skip
def test_stacks_that_cannot_be_simulated_are_refused_with_a_reason(folder, capsys, options, told):
    assert main(["simulate", *options]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err[: len(told)]) == ("", told)


def test_a_file_states_its_own_limit_of_writes(folder, capsys):
    disk = "{type: disk, path: kv, capacity: 8GiB, writes: {per_day: 1TiB}}"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n  - {{type: cpu, capacity: 1GiB}}\n  - {disk}")
    command = ["simulate", "trace.jsonl", "--config", "kvtier.yaml"]
    assert main([*command, "--writes", "1TiB"]) == 2
    assert capsys.readouterr().err == "--writes: 1TiB: the file states its own; write it there\n"
    assert main(command) == 0
    assert "1TiB" in {row["writes a day"] for row in table(capsys.readouterr().out)}


def test_a_plan_within_a_limit_of_writes(folder, capsys):
    command = ["plan", "trace.jsonl", "--ram", "1GiB", "--ssd", "8GiB", "--policy", "lru", "--writes"]
    assert main([*command, "1TiB,2TiB"]) == 2
    assert capsys.readouterr().err == "--writes: 1TiB,2TiB: several limits; give one to plan with\n"
    assert main(["plan", "trace.jsonl", "--ram", "1GiB", "--writes", "1TiB"]) == 2
    assert capsys.readouterr().err == "--writes: 1TiB: memory has no limit; give --ssd, too\n"
    assert main([*command, "40TiB"]) == 0
    told = capsys.readouterr().out
    assert "path: /var/lib/kvtier, capacity: 8GiB, eviction: lru, writes: {per_day: 40TiB}}" in told
    assert {row["into disk"] for row in table(told)} - {"0B"}
    assert main([*command, "40TiB", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["written"].get("disk", 0) <= (40 << 40) / 2880


def test_a_plan_is_the_least_of_what_was_tried_and_can_be_written_down(folder, capsys):
    command = ["plan", "trace.jsonl", "--ram", "1GiB", "--ssd", "8GiB", "--policy", "lru,mru", "--speed"]
    assert main([*command, "dusk=5"]) == 2
    assert capsys.readouterr().err == "--speed: dusk: no such tier; tiers: cpu, disk\n"
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
    assert re.search(r"^1GiB( with \w+)? would take ", told, re.MULTILINE)


def planned(*options):
    """The mean of each candidate that has the whole budget, by the policies of both tiers; and of memory alone."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["plan", "trace.jsonl", *options, "--json"]) == 0
    rows = json.loads(output.getvalue())
    whole = max(row["capacities"] for row in rows)
    return [
        {tuple(row["policies"]): row["mean"] for row in rows if row["capacities"] == budget}
        for budget in (whole, whole[:1])
    ]


@pytest.mark.more
def test_a_plan_leaves_no_better_policy_in_one_of_its_tiers_untried(folder):
    names = all_policies(Registry.discover())
    pairs, _ = planned("--ram", "2%", "--ssd", "8%")
    upper, lower = min(pairs, key=pairs.__getitem__)
    assert {(name, lower) for name in names} | {(upper, name) for name in names} <= pairs.keys()
    assert upper != lower, "a trace on which the same policy is best in both shows nothing"


@pytest.mark.more
def test_a_plan_gives_memory_alone_a_policy_of_its_own(folder):
    _, alone = planned("--ram", "8%", "--ssd", "20%", "--policy", "lru,mru,lru2")
    assert alone.keys() == {("lru",), ("mru",), ("lru2",)}


@pytest.mark.more
def test_a_plan_is_written_in_few_digits(folder, capsys):
    assert main(["plan", "trace.jsonl", "--ram", "8%", "--ssd", "20%", "--policy", "lru"]) == 0
    sizes = re.findall(r"capacity: (\d+)([KMG]iB)", capsys.readouterr().out)
    assert len(sizes) == 2 and all(len(number) <= 5 and unit != "KiB" for number, unit in sizes)


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [(0, "0B"), (999, "999B"), (65 * 2**20, "65MiB"), (1500 * 2**30, "1.46TiB"), (2**60 * 0.97, "993PiB"),
     (2**60 * 3, "3072PiB")],
)  # fmt: skip
def test_sizes_are_told_without_exponents(nbytes, told):
    assert size(nbytes) == told


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
