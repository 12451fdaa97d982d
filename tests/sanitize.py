"""What is compiled touches no memory but its own: its tests, under AddressSanitizer and UBSan.

    python tests/sanitize.py

needs GCC.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from source_copy import ROOT, SourceCopy

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
ARGUMENTS = (
    "tests/test_native.py",
    "tests/storekit/test_files.py",
    "tests/builtin/test_packed.py",
    "tests/builtin/test_packed_slots.py",
    "tests/stack/test_prefix_tree.py",
    "tests/policies/test_native_policies.py",
    "tests/transfer/test_mover.py",
    "tests/transfer/test_cuda_library.py",
    "tests/transfer/test_cuda_mover.py",
    "tests/transfer/test_cuda_packing.py",
    "tests/transfer/test_device_checksums.py",
    "tests/stack/test_machine.py",
    "plugins/kvtier_serve/tests/test_truncated_memory.py",
    # nvcc does not run beside the sanitizers.
    "--deselect=tests/transfer/test_cuda_library.py"
    "::test_the_library_loads_and_tells_whether_there_is_a_device[with nvcc]",
    "--deselect=tests/transfer/test_cuda_library.py"
    "::test_the_library_needs_nothing_that_an_engine_may_have_in_another_version[with nvcc]",
    "--deselect=tests/transfer/test_cuda_library.py::test_the_library_says_what_its_kernels_are_for[with nvcc]",
    # The sanitizers have a handler of their own, which ends the process in another way.
    "--deselect=plugins/kvtier_serve/tests/test_truncated_memory.py::test_other_bus_errors_end_the_process_as_before",
    "--capture=sys",  # what the sanitizers say shall be seen
    "--deselect=tests/test_native.py::test_the_extension_links_nothing_of_the_engines",  # it links the sanitizers
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvtier-sanitize-") as folder:
        build, sources = Path(folder, "build"), Path(folder, "sources")
        sources.mkdir()
        copy = SourceCopy(sources, _built(build))
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(map(_library, ("libasan.so", "libstdc++.so"))),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves much behind
            "CXXFLAGS": FLAGS,  # for what tests compile themselves
        }
        return copy.test(ARGUMENTS, environment).returncode


def _built(folder: Path) -> Path:
    tools = Path(sys.executable).parent
    options = {
        "Python_EXECUTABLE": sys.executable,
        "CMAKE_BUILD_TYPE": "RelWithDebInfo",
        "CMAKE_CXX_COMPILER": "g++",
        "CMAKE_CXX_FLAGS": FLAGS,
        "CMAKE_CUDA_COMPILER": "",
    }
    settings = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run([tools / "cmake", "-S", ROOT / "csrc", "-B", folder, *settings], check=True)
    subprocess.run([tools / "cmake", "--build", folder, "--target", "_native", "--parallel"], check=True)
    (extension,) = folder.glob("_native.*.so")
    return extension


def _library(name: str) -> str:
    told = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return told.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
