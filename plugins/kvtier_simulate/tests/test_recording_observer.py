"""The recording of a live engine's traffic: bounded, salted, its own file at each start."""

from __future__ import annotations

import contextlib
import json
import os

import attrs
import pytest

from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_observers
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.types import Event, EventKind, Nbytes
from kvtier_simulate.recording import Recording, RecordingConfig
from kvtier_simulate.traces import read_trace
from kvtier_testing import ObserverLaws
from kvtier_testing.samples import make_context, make_keys, make_layout

KEYS = tuple(make_keys(4))
LAYOUT = make_layout((64,), blocks=4)


class TestRecording(ObserverLaws):
    def config(self, folder):
        return RecordingConfig(folder / "traffic")


def arrived(request, **known):
    return Event(EventKind.ARRIVED, "", KEYS, tokens=300, request=request, **known)


def finished(request):
    return Event(EventKind.FINISHED, "", tokens=305, request=request, why="stop")


def recorded(folder, prompts=1, capacity=256 << 20):
    """The lines of a new recording of this number of prompts."""
    before = set(folder.glob("*.jsonl"))
    observer = RecordingConfig(folder, Nbytes(capacity)).open(make_context(layout=LAYOUT))
    with contextlib.closing(observer):
        for number in range(prompts):
            observer.observe([arrived(f"{number}")])
            observer.observe([finished(f"{number}")])
    (file,) = set(folder.glob("*.jsonl")) - before
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_recording_is_a_trace(tmp_path):
    config, times = RecordingConfig(tmp_path / "new" / "folder"), iter([100.0, 101.5, 102.0, 103.0])
    with contextlib.closing(Recording(config, make_context(layout=LAYOUT), lambda: next(times))) as observer:
        observer.observe([arrived("a"), arrived("b"), arrived("never"), Event(EventKind.STORED, "cpu")])
        observer.observe([finished("b"), finished("unknown"), finished("a"), finished("a")])
    (file,) = (tmp_path / "new" / "folder").iterdir()
    _, later = map(json.loads, file.read_text().splitlines())
    assert {**later, "hash_ids": len(set(later["hash_ids"]))} == {
        "timestamp": 1500, "input_length": 300, "output_length": 5, "chunk_tokens": LAYOUT.tokens,
        "finish_reason": "stop", "hash_ids": 4,
    }  # fmt: skip
    trace = read_trace(file)
    assert (trace.chunk_tokens, trace.distinct, trace.accesses) == (LAYOUT.tokens, 4, 8)
    assert [prompt.at for prompt in trace.prompts] == [0.0, 0.5]


def test_no_recording_can_be_laid_beside_another(tmp_path):
    (first,), (second,) = recorded(tmp_path), recorded(tmp_path)
    assert not set(first["hash_ids"]) & set(second["hash_ids"])


def test_ids_are_whole_numbers_that_any_reader_can_hold(tmp_path):
    assert all(0 <= each < 2**63 for each in recorded(tmp_path)[0]["hash_ids"])


def test_what_is_stored_in_memory_only_has_no_ids(tmp_path):
    with contextlib.closing(RecordingConfig(tmp_path).open(make_context())) as observer:
        observer.observe([arrived("a", why="it asked to be stored in memory only"), finished("a")])
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["hash_ids"] == []


def test_a_recording_stays_within_its_capacity_over_all_starts(tmp_path):
    assert 0 < len(recorded(tmp_path, 100, 2048)) < 20
    assert recorded(tmp_path, 100, 2048) == []
    assert 1500 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2048


def test_several_engines_that_record_into_one_folder_stay_within_its_capacity(tmp_path):
    contexts = [attrs.evolve(make_context(), replica=each, replicas=2) for each in range(2)]
    observers = [RecordingConfig(tmp_path, Nbytes(4096)).open(context) for context in contexts]
    for observer in observers:
        for _ in range(100):
            observer.observe([arrived("a"), finished("a")])
        observer.close()
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert min(sizes) > 1000 and sum(sizes) <= 4096


def test_a_recording_is_readable_by_its_user_alone(tmp_path):
    recorded(tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_disk_that_fails_ends_the_recording(tmp_path):
    observer = RecordingConfig(tmp_path).open(make_context())
    os.close(observer._file)
    observer._file = os.open(tmp_path, os.O_RDONLY)  # a folder cannot be written to
    with contextlib.closing(observer), pytest.raises(OSError, match="Bad file descriptor"):
        observer.observe([arrived("a"), finished("a")])


def test_a_folder_that_cannot_be_had_is_a_problem_of_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    tiers = [{"type": "heap", "capacity": "1GiB"}]
    chosen = {"type": "recording", "path": str(tmp_path / "file")}
    config = load_config({"version": 1, "tiers": tiers, "observers": [chosen]}, Registry.discover())
    with pytest.raises(
        ConfigError, match=r"inline: \$\.observers\[0\]: cannot write .*: .*(Not a directory|File exists)"
    ):
        open_observers(config, make_context())
