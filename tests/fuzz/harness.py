"""What the fuzzers share: where the sources are, seeds, bounds. Run one as ``python tests/fuzz/fuzz_frame.py``.

Options are libFuzzer's: ``-max_total_time=60`` ends it after a minute, the name of a crash file repeats the crash.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *map(str, sorted((ROOT / "plugins").glob("kvtier_*")))]

#: What hangs or takes everything is a crash, too.
_BOUNDS = ["-timeout=20", "-rss_limit_mb=1024", "-print_final_stats=1"]

_FOLDER = tempfile.TemporaryDirectory(prefix="kvtier-fuzz-")


def new_folder(name: str) -> Path:
    folder = Path(_FOLDER.name, name)
    folder.mkdir()
    return folder


def fuzz(
    one_input: Callable[[bytes], None], seeds: Iterable[bytes], *, longest: int, words: Sequence[bytes] = ()
) -> None:
    """Try inputs, at first the seeds, until one crashes or libFuzzer's options say that it is enough."""
    # libFuzzer ends its process without a goodbye, so this one cleans up.
    child = os.fork()
    if child:
        with _FOLDER:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    options = [*_BOUNDS, f"-max_len={longest}", f"-artifact_prefix={Path.cwd()}/"]
    if words:
        dictionary = new_folder("dictionary") / "words"
        dictionary.write_text("".join(f'"{_escaped(word)}"\n' for word in words))
        options.append(f"-dict={dictionary}")
    if all(argument.startswith("-") for argument in sys.argv[1:]):
        corpus = new_folder("corpus")
        for i, seed in enumerate(seeds):
            (corpus / f"seed-{i}").write_bytes(seed)
        options.append(str(corpus))
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:]], one_input)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)
