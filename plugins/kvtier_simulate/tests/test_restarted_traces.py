"""A restart in the middle of a trace: how much of the next tenth of it is found, beside the same run without one.

Memory for one prompt or two, so that what is found is found on the disk, which has room for 10 in a hundred of the
distinct chunks. A killed engine leaves what its tier had last stored of its log.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
from sizes import some

from kvtier_core.config.registry import Registry
from kvtier_core.interfaces import SupportsListing
from kvtier_core.stack.store_tier.request_log import keys_beside
from kvtier_core.types import Nbytes
from kvtier_simulate import dry_run
from kvtier_simulate.dry_run import Clock, NullBackend, NullBackendConfig, open_dry_run
from kvtier_simulate.replay import serve
from kvtier_simulate.stacks import all_policies, read_capacities, read_policies, stack_of
from kvtier_simulate.study import layout_of
from kvtier_simulate.traces import read_trace

BYTES_PER_TOKEN = 128 << 10
EXTRACT = Path(__file__).parents[3] / "tests" / "policies" / "traces" / "conversation.jsonl"


class Store(NullBackend, SupportsListing):
    """Lists its frames, of which it keeps only the lengths, except of what lies beside the chunks."""

    def __init__(self, frames, namespace):
        self._frames = frames
        self._beside = set(keys_beside(namespace.digest))

    def read(self, keys, into):
        for key, view in zip(keys, into, strict=True):
            if key in self._beside and key in self._frames:
                view[:] = self._frames[key]
        return [len(view) if key in self._frames else 0 for key, view in zip(keys, into, strict=True)]

    def write(self, keys, frames):
        for key, frame in zip(keys, frames, strict=True):
            self._frames.pop(key, None)  # the youngest is the last
            self._frames[key] = bytes(frame) if key in self._beside else len(frame)

    def delete(self, keys):
        for key in keys:
            self._frames.pop(key, None)

    def scan(self) -> Iterator:
        lengths = [(key, each if isinstance(each, int) else len(each)) for key, each in self._frames.items()]
        return iter(lengths)


@attrs.frozen
class StoreConfig(NullBackendConfig):
    type: ClassVar[str] = "store"
    frames: ClassVar[dict] = {}

    def open(self, ctx):
        return Store(self.frames, ctx.namespace)


@pytest.fixture(autouse=True)
def stored(monkeypatch):
    monkeypatch.setattr(dry_run, "NullBackendConfig", StoreConfig)


class Trial:
    """A stack that serves a trace until its next tenth begins."""

    def __init__(self, trace, policy, at):
        self.trace = trace
        layout = layout_of(trace.chunk_tokens, BYTES_PER_TOKEN)
        longest = max(len(prompt.path) for prompt in trace.prompts)
        _, disk = read_capacities("1%+10%", trace, layout)
        capacities = Nbytes(longest * layout.frame_nbytes), Nbytes(disk + (64 << 20))  # the log takes no chunk's room
        policies = read_policies(f"lru+{policy}", 2, Registry.discover())
        stack = stack_of(capacities, policies, trace.chunk_tokens)
        self.clock = Clock()
        self.open = lambda: open_dry_run(stack, layout, self.clock)
        self.begin = int(len(trace.prompts) * at)
        StoreConfig.frames.clear()
        self.engine = self.open()
        for prompt in trace.prompts[: self.begin]:
            self.clock.now = prompt.at
            serve(self.engine, prompt.path, Counter(), prompt.hints)

    def tenth(self, engine):
        """The share of the next tenth's tokens that are found."""
        found = asked = 0
        for prompt in self.trace.prompts[self.begin : self.begin + len(self.trace.prompts) // 10]:
            self.clock.now = prompt.at
            sources = serve(engine, prompt.path, Counter(), prompt.hints)
            found += self.trace.tokens_in(prompt, len(sources))
            asked += prompt.tokens
        return found / asked

    def restarted(self, frames):
        """The same by an engine that finds these frames."""
        StoreConfig.frames.clear()
        StoreConfig.frames.update(frames)
        self.clock.now = self.trace.prompts[self.begin - 1].at
        return self.tenth(self.open())


def rates(trace, policy, at):
    """Of an engine that goes on, of one that was closed, and of one that was killed."""
    trial = Trial(trace, policy, at)
    killed = dict(StoreConfig.frames)
    trial.engine.close()
    closed = dict(StoreConfig.frames)
    after_close, after_kill = trial.restarted(closed), trial.restarted(killed)
    again = Trial(trace, policy, at)
    return again.tenth(again.engine), after_close, after_kill


@pytest.mark.parametrize("policy", some(["gittins", "lru2", "s3fifo"]))
def test_as_much_is_found_after_a_restart_as_without_one(policy):
    """To the token, on the extract. Without the log it is up to 15 points less."""
    on, closed, killed = rates(read_trace(EXTRACT), policy, 0.8)
    assert on == closed == killed


if __name__ == "__main__":
    dry_run.NullBackendConfig = StoreConfig
    trace = read_trace(sys.argv[1])
    for policy in all_policies(Registry.discover()):
        for at in (0.5, 0.8):
            print(policy.ljust(12), at, *(f"{rate:.4f}" for rate in rates(trace, policy, at)), flush=True)
