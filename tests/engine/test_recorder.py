"""The recording of a live server's traffic: bounded, salted, its own file at each start."""

from __future__ import annotations

import json
import os

import attrs
import pytest
from patience import HANG

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.recorder import Recorder
from kvtier_core.errors import ConfigError
from kvtier_simulate.traces import read_trace

KEYS = [os.urandom(32) for _ in range(4)]


def config(path, **settings):
    record = {"path": str(path), **settings}
    tiers = [{"type": "heap", "capacity": "1GiB"}]
    return load_config({"version": 1, "chunk_tokens": 64, "tiers": tiers, "record": record}, Registry())


def finished(recorder, prompts=1, since=0.0):
    for _ in range(prompts):
        recorder.record(since, 300, 5, KEYS, "stop")
    recorder.close()
    return [json.loads(line) for line in recorder.path.read_text().splitlines()]


def test_a_recording_is_a_trace(tmp_path):
    recorder = Recorder(config(tmp_path / "new" / "folder"), clock=lambda: 100.0)
    recorder.record(102.0, 300, 5, KEYS, "stop")
    (later,) = finished(recorder, since=101.5)[1:]
    assert {**later, "hash_ids": len(set(later["hash_ids"]))} == {
        "timestamp": 1500, "input_length": 300, "output_length": 5, "chunk_tokens": 64,
        "finish_reason": "stop", "hash_ids": 4,
    }  # fmt: skip
    trace = read_trace(recorder.path)
    assert (trace.chunk_tokens, trace.distinct, trace.accesses) == (64, 4, 8)
    assert [prompt.at for prompt in trace.prompts] == [0.0, 0.5]


def test_no_recording_can_be_laid_beside_another(tmp_path):
    first, second = Recorder(config(tmp_path)), Recorder(config(tmp_path))
    assert first.path != second.path
    assert not set(finished(first)[0]["hash_ids"]) & set(finished(second)[0]["hash_ids"])


def test_ids_are_whole_numbers_that_any_reader_can_hold(tmp_path):
    assert all(0 <= each < 2**63 for each in finished(Recorder(config(tmp_path)))[0]["hash_ids"])


def test_a_recording_stays_within_its_capacity_over_all_starts(tmp_path):
    stack = config(tmp_path, capacity="2KiB")
    assert 0 < len(finished(Recorder(stack), 100)) < 20
    assert finished(Recorder(stack), 100) == []
    assert 1500 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2048


def test_several_engines_that_record_into_one_folder_stay_within_its_capacity(tmp_path):
    recorders = [Recorder(config(tmp_path, capacity="4KiB"), replicas=2) for _ in range(2)]
    assert all(len(finished(recorder, 100)) > 5 for recorder in recorders)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4096


def test_a_recording_is_readable_by_its_user_alone(tmp_path):
    recorder = Recorder(config(tmp_path / "new"))
    recorder.close()
    assert recorder.path.stat().st_mode & 0o777 == 0o600
    assert recorder.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(tmp_path, caplog):
    recorder = Recorder(config(tmp_path))
    os.close(recorder._file)
    recorder._file = os.open(tmp_path, os.O_RDONLY)  # a folder cannot be written to
    recorder.record(0.0, 300, 5, KEYS, "stop")
    recorder._pool.wait(HANG)
    assert finished(recorder, 3) == []
    assert [r.message for r in caplog.records if "recording stopped" in r.message] == [
        "kvtier: recording stopped: [Errno 9] Bad file descriptor"
    ]


def test_a_slow_disk_costs_lines_and_not_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("kvtier_core.engine.recorder._MAX_WAITING", 0)
    assert finished(Recorder(config(tmp_path)), 7) == []
    assert "kvtier: 7 requests were not recorded: the disk was too slow" in [r.message for r in caplog.records]


def test_a_recorder_may_be_closed_twice(tmp_path):
    recorder = Recorder(config(tmp_path))
    recorder.close()
    recorder.close()


def test_a_folder_that_cannot_be_had_is_a_problem_of_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"inline: \$\.record\.path: cannot be written: .*Not a directory|File exists"
    ):
        Recorder(config(tmp_path / "file"))


def test_recording_is_off_by_default(tmp_path):
    stack = load_config({"version": 1, "tiers": [{"type": "heap", "capacity": "1GiB"}]}, Registry())
    assert stack.record is None


def test_settings_of_a_recording_are_checked(tmp_path):
    with pytest.raises(ConfigError) as raised:
        config(tmp_path, capacity="5", paht="x")
    assert [str(problem) for problem in raised.value.problems] == [
        "inline: $.record.capacity: '5' is not a size; write a whole number and B, KiB, MiB, GiB, TiB or PiB",
        "inline: $.record.paht: unknown key 'paht'; did you mean 'path'?",
    ]
    assert attrs.fields(type(config(tmp_path).record)).capacity.default == 256 << 20
