"""`make gpu-check` without a GPU: what its sections print, and how it tells what failed."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import types
import zipfile
from importlib.metadata import version
from pathlib import Path

import attr
import attrs
import pytest
import release
import torch
import yaml
from device_engine.engine import Tally, WrongKV
from fake_cuda import FakeCuda
from patience import wait_until

from benchmarks import gpu, gpu_build, gpu_direct_reads, gpu_effects, gpu_sections
from benchmarks.gpu_report import Ended, Outcome, Section, as_json, as_text, failed, lines_of, run, start
from benchmarks.measure import Table

ROOT = Path(__file__).parents[1]
TABLE = Table("Speeds", "in GB/s", ["page", "speed"], [["2KiB", 12.3456], ["8KiB", 1234.5]])


def python(script: str, limit: float = 60) -> Section:
    return Section(script[:10], (sys.executable, "-c", script), limit)


def prints(*items: Table | str) -> str:
    return "\n".join(f"print({line!r}, flush=True)" for line in lines_of(items))


def report(*sections: Section, seconds: float = 100.0) -> list[Outcome]:
    return list(run(sections, seconds))


# -- the report ------------------------------------------------------------------------------------------


def test_the_report_contains_the_output_of_sections():
    outcomes = report(python("print('noise')\n" + prints(TABLE)), python("pass"))
    assert (failed(outcomes), [each.tables for each in outcomes]) == ([], [[TABLE], []])
    assert "## Speeds\n\nin GB/s\n\n| page | speed |\n| --- | ---: |\n| 2KiB | 12.3 |\n| 8KiB | 1234 |" in as_text(
        outcomes, "check"
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
    first, second = outcomes = report(broken, python(prints(TABLE)), seconds=broken.limit + 60)
    assert failed(outcomes) == [broken.name]
    assert (first.tables, second.tables) == ([TABLE], [TABLE])
    assert re.search(rf"\| failed \| .* \| .*{re.escape(why.split(': ')[-1])}", as_text(outcomes, "check"))
    assert not json.loads(as_json(outcomes))["ok"]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_its_child_processes_end_with_it():
    """A worker that CUDA holds must not keep the GPU from the sections behind it."""
    ended = start(("sh", "-c", "sleep 9000 >/dev/null 2>&1 & echo $!; wait"), 2)
    assert ended.code is None
    wait_until(lambda: not runs(int(ended.out)))


def test_time_is_shared_and_its_end_is_reported():
    now, limits = [0.0], []

    def takes_long(command, limit):
        limits.append(limit)
        now[0] += limit
        return Ended(0, "", "")

    sections = [Section(name, (), 40.0) for name in ("a", "b", "c", "d")]
    outcomes = list(run(sections, 100.0, takes_long, lambda: now[0]))
    assert limits == [40.0, 40.0, 20.0]
    assert (failed(outcomes), outcomes[-1].problems) == (["d"], ["no time was left for it"])


def test_a_section_may_use_only_the_time_that_others_left():
    now, limits = [0.0], []

    def takes(command, limit):
        limits.append(limit)
        now[0] += min(limit, *command)
        return Ended(0, "", "")

    sections = [
        Section("quick", (10.0, 10.0), 40.0),
        Section("long", (500.0, 500.0), 40.0),
        Section("last", (1, 1), 20.0),
    ]
    list(run(sections, 100.0, takes, lambda: now[0]))
    assert limits == [40.0, 70.0, 20.0]


# -- what is measured ------------------------------------------------------------------------------------


def test_engines_are_reported_and_wrong_kv_is_a_problem():
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


def test_ways_from_slabs_to_pages_bring_the_same_bytes(tmp_path):
    table, *problems = gpu_direct_reads.tables(tmp_path, device="cpu", frames=9)
    assert not problems
    assert [row[0] for row in table.rows] == ["bounce", "gds, host's memory", "raw", "gds, GPU's memory"]
    assert table.rows[-1][-1] == "the engine does not run on a GPU"


def test_memory_that_cannot_be_page_locked_ends_that_measurement(monkeypatch):
    cuda = FakeCuda()
    cuda.fail("cuMemHostRegister", after=1)
    monkeypatch.setattr(gpu_effects, "load", lambda: types.SimpleNamespace(device=lambda number: cuda.device()))
    monkeypatch.setattr(gpu_effects, "LOCKED", 8 << 20)
    monkeypatch.setattr(gpu_effects, "_LOCKED_WITHIN", 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    locking = gpu_effects._Locking(1 << 20)
    over = locking.begin()
    with pytest.raises(RuntimeError, match=r"^page-locked: 8MiB -> 1MiB"):
        assert not over()
    locking.registration.close().join()


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


def test_its_sections_exist_and_fit_into_nine_minutes(monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: tool)
    assert sum(section.limit for section in gpu.sections()) <= gpu.SECONDS <= 9 * 60
    named = [section.command[-1] for section in gpu.sections() if "benchmarks.gpu_sections" in section.command]
    assert set(named) == set(gpu_sections.SECTIONS)


def test_correctness_is_checked_before_speed():
    names = [section.name for section in gpu.sections()]
    assert names.index("planted") < min(map(names.index, ("checksums", "effects", "direct reads", "copies")))


@pytest.mark.parametrize(
    "file, module, package", [("attrs", attr, "attr"), ("attrs", attrs, "attrs"), ("yaml", yaml, "yaml")]
)
def test_vendored_packages_are_the_released_ones(file, module, package):
    assert gpu._VENDORED[file].split("-")[1].removesuffix(".zip") == version("PyYAML" if file == "yaml" else file)
    with zipfile.ZipFile(ROOT / "benchmarks/vendor" / gpu._VENDORED[file]) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{package}/") and name.endswith(".py")]
        assert len(names) > 5
        for name in names:
            assert archive.read(name) == (Path(module.__file__).parents[1] / name).read_bytes()


def test_the_gpu_check_needs_no_module_but_torch_pluggy_pytest_and_its_packaging():
    """As on a machine that has nothing else: what is not installed is found in the checkout, and nothing is imported
    before that."""
    packages = [init.parent.name for init in ROOT.glob("plugins/*/kvtier_*/__init__.py")]
    program = f"""
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path]
class Here:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "packaging", "pluggy", "pytest", "_pytest", "iniconfig", "py", "pygments"):
            import importlib.machinery as made
            return made.PathFinder.find_spec(name, {site.getsitepackages()!r}) if name != "torch" else None
sys.meta_path.append(Here)
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import gpu
gpu.find_modules()
import yaml, attrs, benchmarks.gpu_report, kvtier_core.config.load
import importlib.util
missing = [package for package in {packages!r} if importlib.util.find_spec(package) is None]
assert not missing, missing
import kvtier_testing.samples, kvtier_testing.laws.arenas
print(attrs.__file__, yaml.__file__, len(gpu.sections()))
"""
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("benchmarks/vendor") == 2


@pytest.mark.more
def test_the_library_is_built_without_make_or_ninja(tmp_path, monkeypatch):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("make", "ninja"):
        (tools / name).symlink_to("/bin/false")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    library = gpu_build.build(tmp_path / "libkvtier_cuda.so", tmp_path / "kernels")
    assert library.c.kvtier_cuda_architectures().decode() == release.ARCHITECTURES
