"""Programs that run beside a server, each started, read and ended by a thread of its own.

That thread lives as long as its program, because the kernel ends the program with the thread that started it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from kvtier_core.config.model import ProgramConfig
from kvtier_core.outside import printable
from kvtier_core.work.io_pool import run, run_aside

logger = logging.getLogger("kvtier")

_LAUNCH = Path(__file__).with_name("launch.py")
#: Seconds between the end of a program and its next start: at first, and at most. They double.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: Seconds that a program runs before its pauses begin anew.
_STEADY = 60.0
#: Seconds that a program has after SIGTERM.
_ENDING = 5.0
#: Bytes of output that are read at a time; when a program has ended, all that a pipe holds.
_READ, _LAST_READ = 1 << 10, 64 << 10
#: Seconds without reading for each line: the server's threads share one interpreter, and logging a line takes 25 µs.
_PER_LINE = 0.001
#: Bytes of a line in the log.
_LINE = 8 << 10


@attrs.frozen
class Condition:
    """What became of a program until now."""

    process: int | None = None  #: its number, while it runs
    starts: int = 0
    ends: int = 0  #: that nobody asked for, and failed starts
    last_end: str = ""  #: the reason of the last of these


class Programs:
    """The programs of a server. The owner's thread calls every method; only `close` waits for them."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._running: dict[str, _Program] = {}
        self._ending: list[_Program] = []

    def begin(self, programs: Iterable[ProgramConfig], told: Mapping[str, str]) -> None:
        """Run these. Their environment is the server's, with what they are ``told`` of it."""
        own = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
        self._environment = {**own, **told}
        self.adjust(programs)

    def adjust(self, programs: Iterable[ProgramConfig]) -> list[str]:
        """Run these and no others. Returns a line for each that is started or ended."""
        changed = []
        wanted = {program.name: program for program in programs}
        self._ending = [program for program in self._ending if program.thread.is_alive()]
        for name in sorted({*self._running, *wanted}):
            former, new = self._running.get(name), wanted.get(name)
            if former and former.config == new:
                continue
            if former:
                del self._running[name]
                self._ending.append(former)
                former.stop()
            if new:
                self._running[name] = _Program(new, self._environment, former)
            changed.append(f"program {name}: {'ended' if not new else 'replaced' if former else 'started'}")
        return changed

    def conditions(self) -> dict[str, Condition]:
        """What became of each program, by its name."""
        return {name: program.condition for name, program in self._running.items()}

    def stop(self) -> None:
        """End all of them, without waiting."""
        self.adjust(())

    def close(self) -> None:
        """End all of them, and wait for that, unless the kernel does not end one."""
        self.stop()
        deadline = time.monotonic() + 2 * _ENDING
        for program in self._ending:
            program.thread.join(max(0.0, deadline - time.monotonic()))


class _Program:
    """Runs a program again and again, on a thread, until it is stopped."""

    def __init__(self, config: ProgramConfig, environment: Mapping[str, str], former: _Program | None):
        """Begins when the ``former`` program of this name has ended."""
        self.config = config
        self.condition = Condition()
        self._environment = environment
        self._begun = b""  # a line of output without its end
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)  # stays readable
        self.thread = run_aside(functools.partial(self._run, former), f"program-{config.name}")

    def stop(self) -> None:
        """End it, and do not start it again. Does not wait. Called once."""
        os.eventfd_write(self._stop, 1)

    # -- on its thread -------------------------------------------------------------------------------

    def _run(self, former: _Program | None) -> None:
        if former:
            former.thread.join()
        pause = _FIRST_PAUSE
        while not self._is_stopped(0.0):
            began = time.monotonic()
            outcome = run(self._live)
            why = outcome.value if outcome.error is None else f"cannot be started: {outcome.error}"
            if self._is_stopped(0.0):
                logger.info("kvtier: program %s: stopped: %s", self.config.name, why)
                break
            self.condition = Condition(None, self.condition.starts, self.condition.ends + 1, why)
            if time.monotonic() - began >= _STEADY:
                pause = _FIRST_PAUSE
            logger.warning("kvtier: program %s: %s; next start in %.0f s", self.config.name, why, pause)
            if self._is_stopped(pause):
                break
            pause = min(2 * pause, _LONGEST_PAUSE)
        os.close(self._stop)

    def _is_stopped(self, timeout: float) -> bool:
        """Wait for `stop`, at most ``timeout`` seconds."""
        with selectors.PollSelector() as looking:
            looking.register(self._stop, selectors.EVENT_READ)
            return bool(looking.select(timeout))

    def _live(self) -> str:
        """Run it once. Returns why it has ended."""
        with contextlib.ExitStack() as closing:
            failed, launch = os.pipe()
            closing.callback(os.close, failed)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-IS", _LAUNCH, str(os.getpid()), str(launch), *self.config.command],
                    pass_fds=[launch],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            finally:
                os.close(launch)
            closing.enter_context(process)
            closing.callback(_send, process.pid, signal.SIGKILL)  # before it is reaped: the number is still its own
            why_not = self._watch(process, failed, closing)
        code = process.returncode
        return why_not or (f"exit status {code}" if code >= 0 else f"signal {-code}")

    def _watch(self, process: subprocess.Popen[bytes], failed: int, closing: contextlib.ExitStack) -> str:
        """Log its output until it ends, or must be killed. Returns why it could not be started."""
        assert process.stdout is not None, "it has a pipe"
        output, ended, why_not, kill_at = process.stdout.fileno(), os.pidfd_open(process.pid), "", float("inf")
        closing.callback(os.close, ended)
        looking = closing.enter_context(selectors.PollSelector())
        for each in (failed, output, ended, self._stop):
            looking.register(each, selectors.EVENT_READ)
        while (left := kill_at - time.monotonic()) > 0:
            ready = {key.fd for key, _ in looking.select(None if left == float("inf") else left)}
            if failed in ready:
                looking.unregister(failed)
                why_not = self._launched(process.pid, os.read(failed, _READ))
            if self._stop in ready:
                looking.unregister(self._stop)
                _send(process.pid, signal.SIGTERM)
                kill_at = time.monotonic() + _ENDING
            if ended in ready:
                self._log((os.read(output, _LAST_READ) if output in ready else b"") + b"\n")
                break
            if output in ready:
                if not (read := os.read(output, _READ)):
                    looking.unregister(output)
                time.sleep(_PER_LINE * (1 + self._log(read)))
        return why_not

    def _launched(self, process: int, error: bytes) -> str:
        """Take note of its start. Returns why it failed, if there was an ``error``."""
        if error:
            return f"cannot be started: {error.decode(errors='replace')}"
        self.condition = attrs.evolve(self.condition, process=process, starts=self.condition.starts + 1)
        logger.info("kvtier: program %s: started, process %d", self.config.name, process)
        return ""

    def _log(self, read: bytes) -> int:
        """Log the lines that end in what was ``read``. Returns their number."""
        *lines, self._begun = (self._begun + read).split(b"\n")
        if len(self._begun) >= _LINE:
            lines.append(self._begun)
            self._begun = b""
        for line in lines:
            for begin in range(0, len(line.rstrip()), _LINE):
                text = line[begin : begin + _LINE].decode(errors="replace").rstrip().expandtabs()
                logger.info("kvtier: program %s: %s", self.config.name, printable(text, 4 * _LINE))
        return len(lines)


def _send(group: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has become another user's
        os.killpg(group, number)
