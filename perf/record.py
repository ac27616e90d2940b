"""What a benchmark keeps as JSON: its figures, when, by which command and on what machine."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moexport.common.environment import environment


def keep(file: Path, command: str, **figures: object) -> None:
    """Writes the figures of a command and the machine they were measured on."""
    body = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m perf {command}",
        "environment": environment(),
        **figures,
    }
    file.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def kept(file: Path) -> Any:
    """Returns what a file of a benchmark holds."""
    return json.loads(file.read_text(encoding="utf-8"))


def measured_on(body: Any) -> str:
    """Returns the day and the machine of what was kept: processor, cores and memory."""
    facts = body["environment"]
    return (
        f"{body['created'][:10]}: {facts['cpu']['model']}, {facts['cpu']['cores']} cores, "
        f"{facts['memory_bytes'] / 1e9:.0f} GB of memory"
    )


def peak_bytes() -> int:
    """Returns the largest resident set of this process so far.

    Not getrusage: what a process is started from counts into its largest resident set there.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return 1024 * int(peak[1])
