"""How much of a machine's CPU other programs use while something is measured on it."""

import contextlib
import os
import time

import psutil


class OtherLoad:
    """Counts from its making on. Own are all processes of the Ray session (its driver's, too, where that runs here), or
    without Ray those of this process; time that a hypervisor gave to others counts as theirs."""

    def __init__(self) -> None:
        self._root = _session_root()
        self._start = self._read()

    def share(self) -> float:
        """The part of the time of the cores that this process may use; 0 to 1."""
        seconds, busy_s, own_s = (now - before for now, before in zip(self._read(), self._start, strict=True))
        return min(1.0, max(0.0, (busy_s - own_s) / seconds))

    def _read(self) -> tuple[float, float, float]:
        """Seconds so far of the cores together, of those they were busy, and of the latter our own."""
        every = psutil.cpu_times(percpu=True)
        cores = [every[i] for i in os.sched_getaffinity(0) if i < len(every)]
        idle_s = sum(core.idle + core.iowait for core in cores)
        seconds = time.monotonic() * len(cores)
        own_s = 0.0
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                # with that of children that have ended, which would otherwise leave the sum when they do
                own_s += sum(process.cpu_times()[:4])
        return seconds, seconds - idle_s, own_s


def _session_root() -> psutil.Process:
    """The process that all of this Ray session descend from on this machine."""
    for process in psutil.Process().parents():
        if process.name() == "raylet":
            parent = process.parent()  # the driver of a local cluster, or `ray start --block`
            return parent if parent is not None and "python" in parent.name() else process
    return psutil.Process()
