"""What a sweep has measured, on disk: one JSON line an event, written through before anybody counts on it.

The journal is the truth of a sweep. Cohorts read from it where they stopped, the driver publishes from it, and
`--resume` needs nothing else. One process writes it (an actor on the driver's node, so that the loss of any other node
loses nothing), and an event that is already there is not written again, so that whoever does not know whether a write
arrived writes again. A line is there as a whole or not at all, also on a disk that is full.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rayspec.sweep.record.events import Event, from_line, to_line

GIVEN_UP = "given up"  # a cohort's end that the scheduler decided on


class JournalWriter(Protocol):
    """What a cohort needs of the journal, wherever it is written."""

    def append(self, event: Event) -> None: ...

    def read(self, cohort: str) -> list[Event]: ...


class Journal:
    """The one writer of the file at `path`. A line that a crash has cut off is taken away; for another that is no event
    ValueError is raised."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._refusal: str | None = None
        self._open()
        _sync_folder(self.path.parent)

    def append(self, event: Event) -> None:
        """Write the event, with the time, and return when it is on disk; nothing if it is there.

        Raises OSError where the disk refuses; the file is then as it was before.
        """
        if event.identity in self._known:
            return
        offset = self._file.seek(0, os.SEEK_END)
        line = memoryview(to_line(event, time.time()))
        try:
            while line:  # an almost full disk takes a part
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._refusal = f"{self.path}: {error.strerror}"
            self._file.close()
            self._open()
            raise
        self._refusal = None
        self._remember(event, offset)

    def read(self, cohort: str) -> list[Event]:
        """Everything that concerns a cohort: its own events and those of the whole sweep."""
        found = []
        with open(self.path, "rb") as file:
            for offset in sorted([*self._offsets[cohort], *self._offsets[None]]):
                file.seek(offset)
                found.append(from_line(file.readline()))
        return found

    def refusal(self) -> str | None:
        """What the disk said to the last write, None where it took it."""
        return self._refusal

    def _open(self) -> None:
        """Open the file, without the part of a line that may be at its end."""
        self._known: set[tuple[object, ...]] = set()
        self._offsets: dict[str | None, list[int]] = defaultdict(list)  # where lines that concern a cohort begin
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open as long as the sweep
        end = 0
        for offset, event in lines(self.path, 0):
            self._remember(event, end)
            end = offset
        self._file.truncate(end)

    def _remember(self, event: Event, offset: int) -> None:
        self._known.add(event.identity)
        self._offsets[event.cohort].append(offset)


def lines(path: Path, offset: int) -> Iterator[tuple[int, Event]]:
    """Events from `offset` on, each with the offset behind it; a line that is not complete yet is left out.

    Raises ValueError for a line that is no event.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                event = from_line(line)
            except ValueError as error:
                raise damaged(path, offset, error) from error
            offset += len(line)
            yield offset, event


def read(path: Path) -> list[Event]:
    """All events; none where there is no file. Raises ValueError for a line that is no event."""
    return [event for _, event in lines(path, 0)] if path.is_file() else []


def damaged(path: Path, offset: int, cause: object) -> ValueError:
    """The error that says which line is bad, the one at `offset`, and the way out."""
    with open(path, "rb") as file:
        number = 1 + file.read(offset).count(b"\n")
    return ValueError(
        f"{path}, line {number}, is no event of this sweep ({cause}); put back a copy of the file, or take that line "
        "out: what it held is then measured again"
    )


def _sync_folder(folder: Path) -> None:
    """A new file is safe only when its folder's entry is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
