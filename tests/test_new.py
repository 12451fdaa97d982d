"""`kvtier new` makes projects that install, keep the laws and are used in YAML as they are. So do the examples."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from kvtier_core.cli import main
from kvtier_core.config.examine import KINDS
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack, open_token_database
from kvtier_core.config.registry import Registry
from kvtier_core.hookspecs import GROUP
from kvtier_cpu import plugin as cpu
from kvtier_disk import plugin as disk
from kvtier_testing.new import EXAMPLES, kinds
from kvtier_testing.samples import make_context

MODULES = {kind: f"kvtier_example_{kind.replace('-', '_')}" for kind in kinds()}
_KVTIER = "import sys; from kvtier_core.cli import main; sys.exit(main())"
_OPEN = """
import sys
from kvtier_core.config.open import open_stack
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_testing.samples import make_context
open_stack(load_config(sys.argv[1], Registry.discover()), make_context()).close()
"""


def run(*command: object, cwd: Path) -> str:
    """What the command prints. Of this environment it sees the packages, and none of the examples."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def small(yaml: Path, folder: Path) -> Path:
    """The same stack in so little room that a test may open it."""
    file = folder / "kvtier.yaml"
    file.write_text(yaml.read_text().replace("GiB", "MiB").replace("/tmp/kvtier", str(folder / "disk")))
    return file


@pytest.fixture(scope="module")
def projects(tmp_path_factory) -> Path:
    """A folder with a project of each kind, made by the command."""
    folder = tmp_path_factory.mktemp("projects")
    for kind in kinds():
        assert main(["new", f"my-{kind}", "--kind", kind, "--into", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def python(projects) -> Path:
    """The Python of an environment with the packages of this one, and with all projects installed."""
    environment = projects / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=projects)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "all.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = (sys.executable, "-m", "pip", "--python", environment, "install", "--quiet", "--no-deps")
    editable = [word for project in sorted(projects.glob("kvtier-*")) for word in ("--editable", project)]
    run(*install, "--no-build-isolation", *editable, cwd=projects)
    return environment / "bin" / "python"


def test_there_is_an_example_of_each_kind_that_plugins_offer():
    assert {"arena", "backend", "policy", "serializer", "token-database"} <= set(kinds())
    assert len(kinds()) > len(KINDS), "tiers are of two kinds"


@pytest.mark.dist
@pytest.mark.parametrize("kind", kinds())
def test_a_new_project_keeps_the_laws(projects, python, kind):
    told = run(python, "-m", "pytest", "-p", "no:cacheprovider", cwd=projects / f"kvtier-my-{kind}")
    assert re.search(r"\d+ passed", told)


@pytest.mark.dist
def test_new_projects_are_offered_and_nothing_is_broken(projects, python):
    listed = run(python, "-c", _KVTIER, "plugins", "--strict", cwd=projects)
    for kind in kinds():
        assert f"kvtier-my-{kind}:my-{kind}" in listed


@pytest.mark.dist
@pytest.mark.parametrize("kind", kinds())
def test_a_new_project_is_used_in_yaml_at_once(projects, python, kind, tmp_path):
    file = small(projects / f"kvtier-my-{kind}/kvtier.yaml", tmp_path)
    run(python, "-c", _OPEN, file, cwd=tmp_path)
    assert f"my-{kind}" in run(python, "-c", _KVTIER, "check", file, cwd=tmp_path)


@pytest.mark.parametrize("kind", kinds())
def test_no_name_of_the_example_remains(projects, kind):
    project = projects / f"kvtier-my-{kind}"
    made = [path for path in project.rglob("*") if "__pycache__" not in path.parts]
    assert not [path for path in made if "example" in str(path.relative_to(project))]
    text = "".join(path.read_text() for path in made if path.suffix in (".py", ".md", ".toml", ".yaml", ".yml"))
    assert not re.findall(rf"(?i)example[-_]?{kind.replace('-', '[-_]?')}", text)


@pytest.mark.parametrize("kind", kinds())
def test_an_example_is_whole(kind):
    """What else a project needs: bounds of versions, types, a file for CI; and it is short."""
    example = EXAMPLES / kind
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["kvtier>=0.1,<2"]
    assert project["entry-points"] == {GROUP: {f"example-{kind}": f"{MODULES[kind]}.plugin"}}
    assert (example / MODULES[kind] / "py.typed").exists()
    assert "pytest" in (example / ".github/workflows/test.yml").read_text()
    assert len((example / MODULES[kind] / "plugin.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("kind", kinds())
def test_an_example_serves(kind, tmp_path):
    """Unsubstituted, where it stands."""
    registry = Registry.of(cpu, disk, importlib.import_module(f"{MODULES[kind]}.plugin"))
    config = load_config(small(EXAMPLES / kind / "kvtier.yaml", tmp_path), registry)
    open_stack(config, make_context()).close()
    open_token_database(config.sized(16, 4096), make_context().namespace)


@pytest.mark.parametrize("name", ["My", "my_tier", "../my", "-my", "my-", "my--tier", "1my", "", "kvtier-my"])
def test_a_name_that_cannot_be_is_refused(name, tmp_path, capsys):
    assert main(["new", "--kind", "backend", "--into", str(tmp_path), "--", name]) == 2
    assert repr(name) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "kvtier-mine").mkdir()
    assert main(["new", "mine", "--kind", "backend", "--into", str(tmp_path)]) == 2
    assert "already exists; choose another name, or another folder with --into" in capsys.readouterr().err
    assert not list((tmp_path / "kvtier-mine").iterdir())
