"""The journal's actor on a disk that is full for a while."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from disks import fill, small_disk

from rayspec.farm.actor import cluster
from rayspec.sweep.measure.trainable import RemoteJournal, journal_actor
from rayspec.sweep.record.events import CohortEnded
from rayspec.sweep.record.journal import read

EVENT = CohortEnded(cohort="s2", reason="x" * 10_000)  # over a page


def test_who_writes_waits_until_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk, cluster(None):
        path = disk / "journal.jsonl"
        journal = RemoteJournal(journal_actor(path))
        journal.append(replace(EVENT, cohort="s1"))
        ballast = fill(disk)
        writer = threading.Thread(target=journal.append, args=(EVENT,), daemon=True)
        writer.start()
        deadline = time.monotonic() + 60
        while not journal.refusal():
            assert time.monotonic() < deadline
        assert "No space left on device" in str(journal.refusal())
        writer.join(timeout=5)
        assert writer.is_alive()
        assert [e.cohort for e in read(path)] == ["s1"]
        ballast.unlink()
        writer.join(timeout=60)
        assert not writer.is_alive()
        assert [e.cohort for e in read(path)] == ["s1", "s2"]
        assert journal.refusal() is None
