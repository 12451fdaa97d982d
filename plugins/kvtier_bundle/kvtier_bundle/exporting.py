"""`kvtier export`: writes frames of a store tier into a bundle."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import attrs

from kvtier_bundle.format import Writer, frames_of, inspect_frame, must_be_trusted, naming, read_head
from kvtier_bundle.forms import Form, engines_namespace, moved, namespaces_of
from kvtier_core.cli.output import FINE, PROBLEMS, Output
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig, StoreTierConfig
from kvtier_core.config.open import open_token_database
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import KVIdentity
from kvtier_core.errors import BackendError, Gone
from kvtier_core.frames.format import FrameError
from kvtier_core.interfaces import Stored, TokenDatabase
from kvtier_core.layouts import marked
from kvtier_core.outside import LONGEST_PATH, printable
from kvtier_core.stack.store_tier.request_log import keys_beside
from kvtier_core.types import KEY_NBYTES, ChunkKey, Namespace, size
from kvtier_doctor.explain import PROMPT, add_salt_to, salt_of, tokens_of
from kvtier_doctor.stores import store_tier, walk

#: If the file does not set ``chunk_tokens``, lengths of chunks up to this are tried.
_MOST_TOKENS = 4096


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="write frames of a tier into a bundle, a file that engines can read",
        description="Write frames of a store tier into a bundle: a file that a tier of type bundle reads, and that "
        "kvtier import copies into another tier. No engine may use the tier unless it is shared. If an export was "
        "interrupted, the same command continues it.",
    )
    parser.add_argument("tier", help="the name of a tier: its type, or disk#2 for the second of that type")
    parser.add_argument("bundle", help="the file to write; - for standard output")
    parser.add_argument("--config", required=True, help="the configuration file that names the tier")
    parser.add_argument(
        "--namespace", default="", metavar="DIGITS", help="its first digits, if the tier has several namespaces"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        type=Path,
        metavar="FILE",
        help=f"only the chunks of {PROMPT}; it has no adapter and no images; may be repeated",
    )
    add_salt_to(parser, "the cache_salt of the prompts")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for each frame that is left out, and a total. Raises ConfigError and BackendError."""
    config = load_config(options.config, Registry.discover())
    tier = store_tier(options.config, options.tier)
    form = Form.of(tier, _chosen(tier, options.namespace))
    streams = options.bundle == "-"
    say = output.warn if streams else output.say
    with walk(tier) as found:
        chosen = _frames_of(form, found)
        if options.prompt:
            identity = KVIdentity.of(salt_of(options))
            chosen = _Prompts(config, form, chosen, identity).frames(options.prompt, say)
        with _stream(form) if streams else _file(Path(options.bundle), form, chosen) as writer:
            left_out = _copy(chosen, form, writer, output)
    nbytes = sum(extent.nbytes for extent in writer.extents.values())
    say(f"{options.bundle}: {len(writer.extents)} frames, {size(nbytes)}")
    if not streams:
        output.value = {"frames": len(writer.extents), "nbytes": nbytes, "left_out": left_out}
    return PROBLEMS if left_out or not writer.extents else FINE


def _chosen(tier: StoreTierConfig, digits: str) -> Namespace:
    """The namespace of the tier with these first digits, of its own or of the engines'. Raises BackendError."""
    there = namespaces_of(tier)
    named = [
        namespace
        for namespace in there
        if any(each.digest.hex().startswith(digits) for each in (namespace, engines_namespace(namespace)))
    ]
    if len(named) == 1:
        return named[0]
    if not there:
        raise BackendError(f"{tier.name} has no frames that an engine could use")
    listed = "; ".join(_described(each, named or there) for each in named or there)
    why = f"has several namespaces{' with these digits' if digits else ''}" if named else "has no such namespace"
    raise BackendError(f"{tier.name} {why}; choose one with --namespace: {listed}")


def _described(namespace: Namespace, there: Sequence[Namespace]) -> str:
    """Its first digits, and the facts in which the namespaces differ."""
    differing = {name for each in there for name, *_ in namespace.differences(each)}
    facts = [f"{name} {value}" for name, value in namespace.facts if name in differing]
    return printable(" ".join([namespace.digest.hex()[:16], *facts]), LONGEST_PATH)


def _frames_of(form: Form, found: Iterable[Stored]) -> dict[ChunkKey, Stored]:
    """The frames of chunks among these that have this form, by their names.

    A store lists the damaged frames that it keeps after the others: they may have been written again.
    """
    keys = keys_beside(form.namespace.digest)
    beside = {*(form.keyed_seal.names(keys) if form.keyed_seal else keys)}
    frames: dict[ChunkKey, Stored] = {}
    for stored in found:
        if stored.key and stored.home and stored.key not in beside and form.namespace.digest.startswith(stored.home):
            frames.setdefault(stored.key, stored)
    return frames


class _Prompts:
    """Finds the frames of prompts."""

    def __init__(self, config: StackConfig, form: Form, frames: Mapping[ChunkKey, Stored], identity: KVIdentity):
        self._config = config
        self._namespace = engines_namespace(form.namespace)
        self._identity = identity
        self._frames = frames
        self._parts: dict[bytes, list[ChunkKey]] = {}  # the names of each chunk's frames
        keys = form.keyed_seal.keys(list(frames)) if form.keyed_seal else list(frames)
        for key, name in zip(keys, frames, strict=True):
            self._parts.setdefault(_chunk(key), []).append(name)

    def frames(self, files: Sequence[Path], say: Callable[[str], object]) -> dict[ChunkKey, Stored]:
        """The frames of the prompts in these files, each chunk before the next. Raises BackendError."""
        names: list[ChunkKey] = []
        for file in files:
            keys = self._keys(tokens_of(file))
            there = next((number for number, key in enumerate(keys) if _chunk(key) not in self._parts), len(keys))
            if not there:
                raise BackendError(f"{file}: the tier has no chunk of this prompt")
            say(f"{file}: {there} of {len(keys)} chunks")
            names += [name for key in keys[:there] for name in self._parts[_chunk(key)]]
        return {name: self._frames[name] for name in names}

    def _keys(self, tokens: list[int]) -> list[ChunkKey]:
        """The keys of the prompt's chunks; empty if none of them is there."""
        sizes: Iterable[int] = range(1, min(_MOST_TOKENS, len(tokens)) + 1)
        if self._config.chunk_tokens != "auto":
            sizes = [self._config.chunk_tokens]
        for chunk_tokens in sizes:
            database = open_token_database(attrs.evolve(self._config, chunk_tokens=chunk_tokens), self._namespace)
            first = self._named(database, tokens[:chunk_tokens])
            if first and _chunk(first[0]) in self._parts:
                return self._named(database, tokens)
        return []

    def _named(self, database: TokenDatabase, tokens: list[int]) -> list[ChunkKey]:
        return marked(database.keys(tokens, salt=self._identity.salt), self._identity.tenant)


def _chunk(key: ChunkKey) -> bytes:
    """What the keys of all parts of a chunk have in common."""
    return key[: KEY_NBYTES - 1]


def _copy(chosen: Mapping[ChunkKey, Stored], form: Form, writer: Writer, output: Output) -> int:
    """Write the frames that the bundle does not have yet.

    Returns the number of those that are left out: damaged ones, and ones of another codec or seal key.
    """
    left_out = 0
    for key, stored in chosen.items():
        if key in writer.extents:
            continue
        try:
            frame = stored.read(0, stored.nbytes)
        except Gone:
            continue
        found = form.fault(frame, key, form.namespace) or inspect_frame(frame)
        if isinstance(found, FrameError):
            left_out += 1
            output.warn(f"left out: {printable(stored.where, LONGEST_PATH)}: {found.value}")
        else:
            writer.add(key, moved(frame, found, form.in_bundle))
    return left_out


@contextlib.contextmanager
def _stream(form: Form) -> Iterator[Writer]:
    """A bundle on standard output."""
    writer = Writer(sys.stdout.buffer, form.in_bundle)
    writer.begin()
    yield writer
    writer.finish()


@contextlib.contextmanager
def _file(path: Path, form: Form, chosen: Container[ChunkKey]) -> Iterator[Writer]:
    """A bundle in a file, which has another name until it is complete. Raises BackendError."""
    if path.is_dir():
        raise BackendError(f"{path}: a folder; name a file")
    part = path.with_name(f"{path.name}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as closing:
        with naming(part):
            file = closing.enter_context(open(os.open(part, flags, 0o600), "r+b"))
            must_be_trusted(file)
            writer = _continued(file, form, chosen)
        yield writer
        with naming(part):
            writer.finish()
            os.fsync(file.fileno())
            os.replace(part, path)


def _continued(file: BinaryIO, form: Form, chosen: Container[ChunkKey]) -> Writer:
    """Continue an interrupted export, if this is one, up to the first frame that this one did not choose.

    It may have been of other prompts, and frames may have been erased since. Raises BackendError and OSError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BackendError("another export is writing it") from None
    writer = Writer(file, form.in_bundle)
    if not os.fstat(file.fileno()).st_size:
        writer.begin()
        return writer
    if read_head(file) != form.in_bundle:
        raise BackendError("an interrupted export of another namespace; remove it")
    with contextlib.suppress(BackendError):  # where it was interrupted
        for header, frame in frames_of(file):
            if header.key not in chosen:
                break
            writer.skip(ChunkKey(header.key), len(frame))
    file.seek(writer.end)
    file.truncate()
    return writer
