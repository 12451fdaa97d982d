from __future__ import annotations

import contextlib
import random
import socket

#: Below those that the kernel gives to others, perhaps before a server of a test listens.
_PORTS = (10_000, 30_000)


def free_port(side_by_side: int = 1) -> int:
    """A port of the loopback where nobody listens, or the first of several."""
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            for each in range(side_by_side):
                closing.enter_context(socket.create_server(("127.0.0.1", port + each)))
            return port
