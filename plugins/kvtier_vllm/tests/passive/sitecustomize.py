"""Has processes of vLLM sleep where they would poll for each other, so that no process of a test starves the others.

Linux 6.18 was seen to run a process that polls with `sched_yield` for 20 s while others were ready on its core. Python
imports this by itself in each process that has its folder in ``PYTHONPATH``.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0.001)
