"""How far other work on the machine disturbed a measurement: the time its threads had to wait.

Linux counts for every thread how long it ran and how long it was ready and had no core
(`/proc/PID/task/*/schedstat`, Documentation/scheduler/sched-stats). Alone on the machine threads
wait for about a hundredth of the time; beside another program they wait for as long as that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..results import Results

TASKS = Path("/proc/self/task")
DISTURBED = 0.1
"""From this share on times are those of a shared machine."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Nanoseconds that the threads of this process ran, and waited for a core, by thread."""

    threads: dict[str, tuple[int, int]]

    @staticmethod
    def now() -> Scheduled:
        """Reads the counts; none where the system keeps none."""
        found = {}
        for file in TASKS.glob("*/schedstat"):
            try:
                ran, waited = file.read_text(encoding="ascii").split()[:2]
            except (OSError, ValueError):  # the thread has ended
                continue
            found[file.parent.name] = (int(ran), int(waited))
        return Scheduled(found)

    def waited_share(self, since: Scheduled) -> float | None:
        """Returns the share of waiting in all time that threads wanted a core; None if unknown."""
        ran = waited = 0
        for name, (ran_ns, waited_ns) in self.threads.items():
            ran_before, waited_before = since.threads.get(name, (0, 0))
            ran += ran_ns - ran_before
            waited += waited_ns - waited_before
        return waited / (ran + waited) if ran + waited > 0 else None


def disturbance(results: Results) -> str:
    """Returns a sentence on how far other work disturbed the rows; empty where it did not."""
    shares = [each["share"] for each in results.protocol.get("waited", ())]
    most = max(shares, default=0.0)
    if most < DISTURBED:
        return ""
    return (
        "Other work on the machine disturbed these times: threads waited for a core up to "
        f"{most:.0%} of the time that they wanted one. Measure again on a quiet machine."
    )
