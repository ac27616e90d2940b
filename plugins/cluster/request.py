"""The options of `bench`, `calibrate` and `tune` for a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.option import Panel, option
from ...common.text import split_list
from ...errors import UsageError

API = 1


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options for a Ray cluster and its nodes."""

    ray: str | None = option(
        None,
        "The Ray cluster to use: its address, auto (this machine's cluster) or local (a new one).",
        unset="no cluster",
        compare=False,
    )
    on: str | Sequence[str] | None = option(
        None,
        "The Ray resource of the nodes to use, such as accelerator_type:L4. bench accepts several, "
        "and writes a report for each.",
        unset="CPU",
        compare=False,
    )

    @property
    def kinds(self) -> list[str]:
        """The resources of the nodes to use; raises `UsageError` for an empty list."""
        named = "CPU" if self.on is None else self.on
        kinds = list(dict.fromkeys(split_list(named) if isinstance(named, str) else named))
        if not kinds:
            raise UsageError(
                f"--on {self.on}: no resource is given", hint="`ray status` lists them"
            )
        return kinds

    @property
    def kind(self) -> str:
        """The resource of the nodes to use; raises `UsageError` if there are several."""
        kind, *others = self.kinds
        if others:
            raise UsageError(f"--on {self.on}: one resource is expected", hint=f"--on {kind}")
        return kind


PANEL = Panel(
    "cluster",
    "Cluster",
    ("bench", "calibrate", "tune"),
    ClusterOptions,
    "moexport.plugins.cluster.cli:cluster_options",
)
