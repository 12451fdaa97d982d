"""Becomes a program of a server: the first thing that `programs` runs in its process, by the path of this file."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def launch(server: int, failed: int, command: list[str]) -> None:
    """Become the command, which the kernel ends with the process ``server``. Why it cannot goes to ``failed``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before
        return
    os.set_inheritable(failed, False)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so by what it becomes
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(failed, (error.strerror or str(error)).encode())


if __name__ == "__main__":
    launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
