"""`make gpu-check` without a GPU: what it measures, over a device that makes up times, and how it tells what failed."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_engine.engine import Tally, WrongKV

from benchmarks import gpu, gpu_device, gpu_sections
from benchmarks.gpu_report import Ended, Outcome, Section, as_json, as_text, failed, lines_of, run, start
from benchmarks.gpu_sections import COUNTS, DIRECTIONS, MOST_NBYTES, PAGES, Copied, Locking
from benchmarks.measure import Table
from kvtier_core.transfer.host_mover import HostMover

TABLE = Table("Speeds", "in GB/s", ["page", "speed"], [["2KiB", 12.3456], ["8KiB", 1234.5]])


def python(script: str, limit: float = 60) -> Section:
    return Section(script[:10], (sys.executable, "-c", script), limit)


def prints(*items: Table | str) -> str:
    return "\n".join(f"print({line!r}, flush=True)" for line in lines_of(items))


def report(*sections: Section, seconds: float = 100.0) -> list[Outcome]:
    return list(run(sections, seconds))


# -- the report ------------------------------------------------------------------------------------------


def test_what_sections_print_is_the_report():
    outcomes = report(python("print('noise')\n" + prints(TABLE)), python("pass"))
    assert (failed(outcomes), [each.tables for each in outcomes]) == ([], [[TABLE], []])
    assert "## Speeds\n\nin GB/s\n\n| page | speed |\n| --- | ---: |\n| 2KiB | 12.3 |\n| 8KiB | 1234 |" in as_text(
        outcomes
    )
    told = json.loads(as_json(outcomes))
    assert told["ok"] is True
    assert told["sections"][0]["tables"][0]["rows"] == [["2KiB", 12.3456], ["8KiB", 1234.5]]


@pytest.mark.parametrize(
    "end, why",
    [
        ("raise ValueError('it broke')", "ValueError: it broke"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with -9: it said nothing"),
        ("import time; time.sleep(60)", "it was not done after 2 s"),
        (prints("one copy failed"), "one copy failed"),
    ],
)
def test_a_section_that_fails_is_a_row_and_keeps_what_it_had(end, why):
    broken = python(f"{prints(TABLE)}\n{end}", limit=2 if "sleep" in end else 60)
    first, second = outcomes = report(broken, python(prints(TABLE)))
    assert failed(outcomes) == [broken.name]
    assert (first.tables, second.tables) == ([TABLE], [TABLE])
    assert re.search(rf"\| failed \| .* \| .*{re.escape(why.split(': ')[-1])}", as_text(outcomes))
    assert not json.loads(as_json(outcomes))["ok"]


def test_what_it_started_ends_with_it():
    """A worker that CUDA holds must not keep the GPU from the sections behind it."""
    ended = start(("sh", "-c", "sleep 60 & echo $!; wait"), 2)
    assert ended.code is None
    stat = Path(f"/proc/{int(ended.out)}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_time_is_shared_and_its_end_is_told():
    now, limits = [0.0], []

    def takes_long(command, limit):
        limits.append(limit)
        now[0] += limit
        return Ended(0, "", "")

    sections = [Section(name, (), 40.0) for name in ("a", "b", "c", "d")]
    outcomes = list(run(sections, 100.0, takes_long, lambda: now[0]))
    assert limits == [40.0, 40.0, 20.0]
    assert (failed(outcomes), outcomes[-1].problems) == (["d"], ["no time was left for it"])


# -- what is measured ------------------------------------------------------------------------------------


class MadeUp:
    """A device with a bus of 50 GB/s each way. One path is as fast, one half as fast, one fails with small pages."""

    paths = ("whole", "half", "picky")

    def facts(self):
        return {"device": "made up"}

    @contextlib.contextmanager
    def bench(self, page_nbytes, count):
        assert page_nbytes * count <= MOST_NBYTES
        self.page_nbytes = page_nbytes
        yield self

    def memcpy(self, direction, nbytes):
        return nbytes / 50e9 / (2 if direction == "both" else 1)

    def copy(self, path, direction, count):
        if path == "picky" and self.page_nbytes < 4096:
            raise ValueError("pages are too small")
        return Copied(self.memcpy(direction, count * self.page_nbytes) * (2 if path == "half" else 1), 25e-6)

    def locking(self, gib):
        quick, slow = [1e-6] * 1000, [1e-6] * 980 + [1e-3] * 20
        return Locking(0.2 * gib, (quick, slow), (quick, quick))

    def tokens(self, path):
        if path == "picky":
            raise ValueError("no")
        return [10e-6] * 99 + [700e-6 if path else 20e-6]


def test_ratios_are_to_the_memcpy_of_the_same_bytes():
    items = list(gpu_sections.copies(MadeUp()))
    tables = [item for item in items if isinstance(item, Table)]
    assert [table.title for table in tables][:2] == ["Copies: pages of 2KiB", "Copies: pages of 8KiB"]
    assert len(tables) == len(PAGES)
    assert tables[1].header == (
        "direction",
        "pages",
        "memcpy GB/s",
        "whole",
        "whole µs",
        "half",
        "half µs",
        "picky",
        "picky µs",
    )
    assert len(tables[1].rows) == len(DIRECTIONS) * len(COUNTS)
    for row in tables[1].rows:
        assert row[2:] == pytest.approx([100.0 if row[0] == "both" else 50.0, 1.0, 25.0, 0.5, 25.0, 1.0, 25.0])
    assert [row[7] for row in tables[0].rows] == ["failed"] * len(tables[0].rows)
    problems = [item for item in items if isinstance(item, str)]
    assert problems[0] == "store of 64 pages of 2KiB by picky: pages are too small"
    assert len(problems) == len(tables[0].rows)


def test_percentiles_are_told_before_and_meanwhile():
    (table,) = gpu_sections.registration(MadeUp())
    assert table.says.startswith("0.2 s a GiB: 4 GiB,")
    assert table.rows[0][1:] == pytest.approx([1.0, 1.0, 1.0, 1000.0, 1000])
    assert table.rows[1][1:] == pytest.approx([1.0, 1.0, 1.0, 1.0, 1000])


def test_tokens_are_told_alone_and_beside_each_path():
    table, problem = gpu_sections.tokens(MadeUp())
    assert [row[0] for row in table.rows] == ["alone", "whole", "half", "picky"]
    assert [row[3] for row in table.rows[:2]] == pytest.approx([20.0, 700.0])
    assert (table.rows[3][1], problem) == ("failed", "tokens beside a store by picky: no")


def test_engines_are_told_and_wrong_kv_is_a_problem():
    def wrong():
        raise WrongKV("step 3: 2 tokens were read that are not what was computed")

    tally = Tally(requests=9, steps=40, asked_tokens=1000, loaded_tokens=500)
    table, *problems = gpu_sections.engines(
        {"good": lambda: tally, "bad": wrong, "cold": lambda: Tally(asked_tokens=1)}
    )
    assert table.rows[0][:4] == ["good", 9, 40, 0.5]
    assert table.rows[1][:2] == ["bad", "failed"]
    assert problems == [
        "bad: WrongKV: step 3: 2 tokens were read that are not what was computed",
        "cold: nothing was loaded",
    ]
    (table,) = gpu_sections.planted({"a bug": wrong, "another": lambda: tally})
    assert [row[1].split(":")[0] for row in table.rows] == ["WrongKV", "not noticed"]


# -- the device's own code, over the CPU -----------------------------------------------------------------


class Stream(torch.cpu.Stream):
    def synchronize(self) -> None:
        pass


class OnCpu:
    """torch as `gpu_device` uses it, without a GPU and without pinned memory."""

    cuda = SimpleNamespace(Stream=Stream, stream=torch.cpu.stream, synchronize=lambda: None)

    def __getattr__(self, name):
        if name not in ("empty", "zeros"):
            return getattr(torch, name)
        return lambda *shape, pin_memory=False, **options: getattr(torch, name)(*shape, **options)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(gpu_device, "torch", OnCpu())
    monkeypatch.setattr(gpu_device, "_DEVICE", "cpu")
    monkeypatch.setattr(
        gpu_device, "open_mover", lambda cache, memory, nbytes, autotune: HostMover(cache, memory, nbytes)
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_jobs_of_the_bench_copy_what_they_say(on_cpu, direction):
    with gpu_device.Gpu().bench(4096, 256) as bench:
        assert bench.memcpy(direction, 4096 * 256) > 0
        for count in (64, 256):
            copied = bench.copy(gpu_device.Gpu.paths[0], direction, count)
            assert copied.whole >= copied.submit > 0


def test_tokens_are_copied_while_a_store_is_under_way(on_cpu, monkeypatch):
    monkeypatch.setattr(gpu_device, "MOST_NBYTES", 16 << 20)
    for path in (None, *gpu_device.Gpu.paths):
        assert len(gpu_device.Gpu().tokens(path)) > 4


# -- the command -----------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_in_a_sentence(monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.fullmatch(r"gpu-check: no GPU: torch \S+ finds none here\. Nothing was checked\.", gpu.main())


def test_with_one_it_leaves_both_reports_and_names_what_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "sections", lambda: [python(prints(TABLE)), Section("broken", ("false",), 60)])
    assert gpu.main(tmp_path / "reports") == "gpu-check: failed: broken"
    text = (tmp_path / "reports/gpu-check.txt").read_text()
    assert capsys.readouterr().out == text
    assert "| broken | failed |" in text
    assert not json.loads((tmp_path / "reports/gpu-check.json").read_text())["ok"]


def test_its_sections_exist_and_fit_into_nine_minutes():
    assert gpu.SECONDS <= 9 * 60
    named = [section.command[-1] for section in gpu.sections() if "benchmarks.gpu_sections" in section.command]
    assert set(named) == {*gpu_sections.OF_DEVICE, "engine", "planted", "forward"}
