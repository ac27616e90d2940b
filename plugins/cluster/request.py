"""What is asked of a Ray cluster: options of `bench`, `calibrate` and `tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.option import Panel, option
from ...common.text import listed
from ...errors import UsageError

API = 1


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A Ray cluster, and which of its nodes."""

    ray: str | None = option(
        None,
        "Run on a Ray cluster: its address, auto (this machine's cluster) or local (a new one).",
        unset="no cluster",
        compare=False,
        metavar="ADDRESS",
    )
    on: str | Sequence[str] | None = option(
        None,
        "The Ray resource of the nodes to use: accelerator_type:L4. A list for bench, which writes "
        "a report for each.",
        unset="CPU",
        compare=False,
        metavar="RESOURCE",
    )

    @property
    def kinds(self) -> list[str]:
        """The resources that tell the kinds of node to use; `UsageError` for an empty list."""
        named = "CPU" if self.on is None else self.on
        kinds = list(dict.fromkeys(listed(named) if isinstance(named, str) else named))
        if not kinds:
            raise UsageError(f"--on {self.on}: names no resource", hint="`ray status` lists them")
        return kinds

    @property
    def kind(self) -> str:
        """The one kind of node to use; `UsageError` for several."""
        kind, *others = self.kinds
        if others:
            raise UsageError(f"--on {self.on}: one resource is expected", hint=f"--on {kind}")
        return kind


PANEL = Panel("cluster", "Cluster", ("bench", "calibrate", "tune"), ClusterOptions)
