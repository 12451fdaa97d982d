"""Small real filesystems that become full, read-only or broken, for tests of what keeps files. They need root."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs

#: The beginning of an image, where the filesystem keeps what it still needs when the device fails.
_HEAD_NBYTES = 256 << 10


class Disk:
    """A filesystem at ``folder``, mounted for one test."""

    def __init__(self, folder: Path):
        self.folder = folder

    def remount(self, mode: str) -> None:
        """``ro`` or ``rw``, even while files are open."""
        _run("mount", "-o", f"remount,{mode}", self.folder)

    def fill(self) -> None:
        """Leave no space for another byte, until `make_room`."""
        with open(self.folder / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        """Free what `fill` took."""
        (self.folder / "ballast").unlink()

    def forget(self) -> None:
        """Drop the cached pages of all files, so that the next read goes to the device."""
        with contextlib.suppress(subprocess.CalledProcessError):  # a sync reports writes that were lost before
            _run("sync", "--file-system", self.folder)
        for file in self.folder.rglob("*"):
            if file.is_file():
                _forget(file)


class DeviceDisk(Disk):
    """A filesystem on a block device whose I/O can be made to fail."""

    def __init__(self, folder: Path, image: Path):
        super().__init__(folder)
        self._image = image
        self._device = _run("findmnt", "--noheadings", "--output", "SOURCE", folder)
        self._tail = b""

    def fail(self) -> None:
        """From now on, until `heal`, nearly every read and write that reaches the device is an I/O error."""
        _run("sync", "--file-system", self.folder)
        with open(self._image, "r+b") as image:
            image.seek(_HEAD_NBYTES)
            self._tail = image.read()
            image.truncate(_HEAD_NBYTES)
        _run("losetup", "--set-capacity", self._device)

    def heal(self) -> None:
        """End the failure: the device has what it had when it failed, and nothing that was written since."""
        with open(self._image, "r+b") as image:
            image.seek(_HEAD_NBYTES)
            image.write(self._tail)
        _run("losetup", "--set-capacity", self._device)


class ChecksummedDisk(Disk):
    """A filesystem with a checksum for every block: a file whose bytes changed on the device cannot be read."""

    def __init__(self, folder: Path, image: Path):
        super().__init__(folder)
        self._image = image

    def spoil(self, file: Path) -> None:
        """From now on each read of this file is an I/O error; other files can be read."""
        _run("sync", "--file-system", self.folder)
        page = file.read_bytes()[:4096]
        _forget(file)
        with open(self._image, "r+b") as image, mmap.mmap(image.fileno(), 0) as device:
            at = device.find(page)
            device[at : at + 8] = bytes(byte ^ 0xFF for byte in page[:8])


@contextlib.contextmanager
def btrfs(home: Path, nbytes: int) -> Iterator[ChecksummedDisk]:
    """A disk in a sparse image of at least 128 MiB, under ``home``. Skips the test where there is no btrfs."""
    needs("mkfs.btrfs", shutil.which("mkfs.btrfs"))
    image = home / "image"
    with open(image, "wb") as file:
        file.truncate(max(nbytes, 128 << 20))
    _run_or_skip("mkfs.btrfs", "-q", "-m", "single", "-d", "single", image)
    with _mounted(home, "-t", "btrfs", "-o", "loop", image) as folder:
        yield ChecksummedDisk(folder, image)


@contextlib.contextmanager
def tmpfs(home: Path, nbytes: int) -> Iterator[Disk]:
    """A disk in memory, under ``home``. Skips the test where nothing may be mounted."""
    with _mounted(home, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs") as folder:
        yield Disk(folder)


@contextlib.contextmanager
def ext4(home: Path, nbytes: int) -> Iterator[DeviceDisk]:
    """A disk in an image, under ``home``. Skips the test where there are no loop devices or no mkfs.ext4."""
    image = home / "image"
    with open(image, "wb") as file:
        file.truncate(nbytes)
    plan = ["-q", "-b", "4096", "-m", "0", "-N", "512", "-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=0"]
    _run_or_skip("mkfs.ext4", *plan, image)
    with _mounted(home, "-t", "ext4", "-o", "loop", image) as folder:
        yield DeviceDisk(folder, image)


def _forget(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@contextlib.contextmanager
def _mounted(home: Path, *what: object) -> Iterator[Path]:
    folder = home / "mounted"
    folder.mkdir()
    _run_or_skip("mount", *what, folder)
    try:
        yield folder
    finally:
        _run("umount", "--lazy", folder)  # files may be open


def _run_or_skip(*command: object) -> None:
    if os.geteuid():
        pytest.skip("only root may mount")
    try:
        _run(*command)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{error} {getattr(error, 'stderr', '')}".strip())


def _run(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
