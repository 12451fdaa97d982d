"""The report of `make gpu-check` and `make gpu-serve`: sections in processes of their own, each survives the others.

A section prints lines of JSON, a table or a problem each. What it has printed counts, whatever becomes of it later: an
error that CUDA never forgets, a crash or a hang ends that process, is a row of the summary, and the next one begins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.measure import Table, progress

ROOT = Path(__file__).parents[1]
#: How many of the last lines of each output of a failed process are reported.
_SAID = 12


@attrs.frozen
class Section:
    """``command`` is run in the repository's root, for ``limit`` seconds and what the others leave."""

    name: str
    command: Sequence[str]
    limit: float


@attrs.frozen
class Ended:
    """What a process came to."""

    code: int | None  #: None: it was ended, because its time was over
    out: str
    said: str  #: on stderr


@attrs.frozen
class Outcome:
    """What a section came to: its tables, and the problems it met; none if all is well."""

    section: str
    seconds: float
    tables: Sequence[Table] = ()
    problems: Sequence[str] = ()


def lines_of(items: Iterable[Table | str]) -> Iterator[str]:
    """What a section prints: tables, and problems as text."""
    for item in items:
        yield json.dumps({"problem": item} if isinstance(item, str) else {"table": _plain(item)})


def start(command: Sequence[str], limit: float) -> Ended:
    """Run a command, and end it with all that it has started when its time is over. Its stderr is shown as it comes."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, said = process.communicate(timeout=limit)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, said = process.communicate()
        code = None
    sys.stderr.write(said)
    return Ended(code, out, said)


def run(
    sections: Sequence[Section],
    seconds: float,
    start: Callable[[Sequence[str], float], Ended] = start,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """The outcomes of the sections, one after the other, all within so many ``seconds``.

    A section may take longer than its limit for as long as those before it have left: all others can still have theirs.
    """
    end = clock() + seconds
    for number, section in enumerate(sections):
        begin = clock()
        kept = sum(each.limit for each in sections[number + 1 :])
        limit = min(end - begin, max(section.limit, end - begin - kept))
        if limit <= 0:
            yield Outcome(section.name, 0.0, problems=["no time was left for it"])
            continue
        ended = start(section.command, limit)
        tables, problems, others = _read(ended.out)
        said = "\n".join([*others[-_SAID:], *ended.said.splitlines()[-_SAID:]])
        if ended.code is None:
            problems.append(f"it was not done after {limit:.0f} s")
        elif ended.code:
            problems.append(f"it ended with {ended.code}: {said or 'it said nothing'}")
        yield Outcome(section.name, clock() - begin, tables, problems)


def _read(out: str) -> tuple[list[Table], list[str], list[str]]:
    """The tables and problems among what a section has printed, and the other lines."""
    tables: list[Table] = []
    problems: list[str] = []
    others: list[str] = []
    for line in out.splitlines():
        try:
            item = json.loads(line)
        except ValueError:  # or it was cut
            item = None
        match item:
            case {"table": table}:
                tables.append(Table(**table))
            case {"problem": problem}:
                problems.append(problem)
            case _:
                others.append(line)
    return tables, problems, others


def leave_report(name: str, sections: Sequence[Section], seconds: float, folder: Path) -> str | None:
    """Run the sections and leave the report in the folder, as text and as JSON. Returns what failed, or None."""
    outcomes: list[Outcome] = []
    folder.mkdir(parents=True, exist_ok=True)
    for outcome in run(sections, seconds):
        progress(f"{name}: {outcome.section}: {'; '.join(outcome.problems) or 'ok'} ({outcome.seconds:.0f} s)")
        outcomes.append(outcome)
        # After each one, so that a report is there if this is ended early.
        (folder / f"{name}.txt").write_text(as_text(outcomes, name))
        (folder / f"{name}.json").write_text(as_json(outcomes))
    print(as_text(outcomes, name), end="")
    return f"{name}: failed: {', '.join(wrong)}" if (wrong := failed(outcomes)) else None


def as_json(outcomes: Sequence[Outcome]) -> str:
    """The whole report for machines."""
    sections = [attrs.asdict(outcome) for outcome in outcomes]
    return json.dumps({"ok": not failed(outcomes), "sections": sections}, indent=1)


def as_text(outcomes: Sequence[Outcome], name: str) -> str:
    """The whole report for people."""
    rows = [
        (each.section, "failed" if each.problems else "ok", each.seconds, "; ".join(map(_one_line, each.problems)))
        for each in outcomes
    ]
    summary = Table("Sections", "Each in processes of its own.", ("section", "outcome", "s", "why"), rows)
    tables = [table for outcome in outcomes for table in outcome.tables]
    said = [f"### {each.section}\n\n{problem}" for each in outcomes for problem in each.problems if "\n" in problem]
    return "\n\n".join([f"# {name}", *map(str, [summary, *tables]), *said]) + "\n"


def failed(outcomes: Sequence[Outcome]) -> list[str]:
    """The sections that met a problem."""
    return [outcome.section for outcome in outcomes if outcome.problems]


def _plain(table: Table) -> dict[str, Any]:
    """A table whose cells are numbers and text."""
    rows = [[cell if isinstance(cell, int | float) else str(cell) for cell in row] for row in table.rows]
    return {"title": table.title, "says": table.says, "header": list(table.header), "rows": rows}


def _one_line(problem: str) -> str:
    return problem.strip().splitlines()[-1].replace("|", "/")
