"""Identifies the weights that the engine has loaded for a LoRA adapter.

No connector learns when workers read an adapter's files: when the server is asked to load it, perhaps before the first
request, and again after they evicted it. So an adapter is identified only if its files cannot have changed since the
engine started.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
from vllm.lora.request import LoRARequest

from kvtier_core.identity import weights
from kvtier_core.outside import printable
from kvtier_core.storekit.folder import file_system_of
from kvtier_vllm.requests.fields import ADAPTER, Unidentified, refuse_others

#: Nanoseconds. Change times of files are coarse, by up to two seconds, and a leap second may be inserted.
_MARGIN = 3_000_000_000
#: ns by which the two clocks of a `Moment` may seem to part: they are not read at once, and one of them is corrected.
_APART = 3_000_000_000

#: File systems whose change times come from this machine's clock and cannot be set by a program.
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})

_MOUNTS = Path("/proc/self/mountinfo")

_State = tuple[tuple[str, int, int], ...]  # path, device and inode


@attrs.frozen
class Moment:
    """A time in ns, by the clock that files are stamped with and by one that cannot be set."""

    by_files: int = attrs.field(factory=time.time_ns)
    by_boot: int = attrs.field(factory=lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME))


class Adapters:
    """The adapters that requests have named. Make one when the engine starts, before an adapter can be loaded."""

    def __init__(self, began: Moment | None = None) -> None:
        self._began = began or Moment()
        self._seen: dict[int, tuple[tuple, str]] = {}  # by vLLM's number: path and state of the files; their digest

    def content(self, asked: LoRARequest) -> str:
        """A digest of the adapter's weights and configuration. Raises Unidentified.

        vLLM requires that an adapter's number "must be globally unique for a given adapter", and so does this.
        """
        name = printable(asked.lora_name)
        try:
            refuse_others("a LoRA adapter", asked, ADAPTER)
            return f"{self._files(asked)} {asked.is_3d_lora_weight}"
        except (OSError, ValueError):
            raise Unidentified(f"LoRA adapter {name}: cannot read its weights from disk") from None
        except Unidentified as why:
            raise Unidentified(f"LoRA adapter {name}: {why}") from None

    def _files(self, asked: LoRARequest) -> str:
        path = Path(asked.lora_path)
        state = (asked.lora_path, self._settled(path))
        if asked.lora_int_id not in self._seen:
            _require_local(state[1])
            digest = weights.digest(path)
            if not digest:
                raise Unidentified("no weights in its folder")
            if state[1] != self._settled(path):
                raise Unidentified("its files changed while they were read")
            self._seen[asked.lora_int_id] = state, digest
        before, digest = self._seen[asked.lora_int_id]
        if state != before:
            raise Unidentified("its files differ from those that the engine saw first")
        return digest

    def _settled(self, path: Path) -> _State:
        """The places of the files of a folder. Raises Unidentified if a file, or the path to it, may have changed."""
        now = Moment()
        if now.by_files - now.by_boot < self._began.by_files - self._began.by_boot - _APART:
            raise Unidentified("the machine's clock was set back since the engine started")
        steps = list(_steps_to(Path("/"), path.absolute()))
        folder, _ = steps[-1]
        for name in sorted(os.listdir(folder)):
            steps += _steps_to(folder, Path(name))
        for step, status in steps:
            above = step != folder and stat.S_ISDIR(status.st_mode)
            if status.st_ctime_ns >= self._began.by_files - _MARGIN and not (above and _only_entries_changed(status)):
                raise Unidentified(f"{printable(str(step))} changed after the engine started, or just before")
        return tuple((str(step), status.st_dev, status.st_ino) for step, status in steps)


def _only_entries_changed(folder: os.stat_result) -> bool:
    """Was the last change to a folder that an entry was added or removed? Then its two times are equal.

    If the folder itself was moved here, they differ, unless an entry was added or removed later.
    """
    return folder.st_ctime_ns == folder.st_mtime_ns


def _steps_to(done: Path, path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and link on the path from the folder ``done``, which is not a link, to a file; then the file."""
    ahead = list(reversed(path.parts))
    while ahead:
        step = done / ahead.pop()
        if step.name == "..":
            step = done.parent
        status = step.lstat()
        yield step, status
        if stat.S_ISLNK(status.st_mode):
            ahead += reversed(Path(os.readlink(step)).parts)
        else:
            done = step


def _require_local(state: _State) -> None:
    """Raise Unidentified if a file is on a file system whose change times may be another machine's."""
    for step, *_ in state:
        if (kind := file_system_of(Path(step), _MOUNTS)) not in _LOCAL:
            step = printable(step)
            raise Unidentified(f"{step} is on a file system ({kind}) whose times may come from another machine")
