"""What several commands print: plain data, and how the layers of an export compute."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..common.text import lines, table

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import Manifest


def json_text(content: Any) -> str:
    """Plain data as indented JSON."""
    return json.dumps(content, indent=2, ensure_ascii=False)


def precisions_text(layers: Iterable[tuple[str, str, str]]) -> str:
    """Returns a table of the layers' precisions, with the reason of each."""
    return table(("MoE layer", "precision", "because"), list(layers))


def backbone_departures(manifest: Manifest) -> list[str]:
    """Returns the nodes of the backbone not in the precision asked for, and why."""
    numbers = manifest.numbers
    fp32_nodes = numbers.get("fp32_nodes", ())
    linears = numbers.get("linears", {})
    return [
        *(f"{node['node']} ({node['op_type']}): {node['reason']}" for node in fp32_nodes),
        *(f"{node}: not in INT8: {reason}" for node, reason in linears.items() if reason),
    ]


def tuning_text(tuning: dict[str, Any]) -> tuple[str, ...]:
    """Returns what `--lowering tune` measured, and on what; nothing where it was not asked for."""
    if not tuning:
        return ()
    rows = []
    for group in tuning["measured"]:
        first, *more = group["layers"]
        layers = f"{first} and {len(more)} like it" if more else first
        kept = f"{group['k']}/{group['experts']}"
        for found in group["candidates"]:
            ms = found["latency_ms"]
            figures = (f"{ms['median']:.3g}", f"{ms['spread']:.0%}", str(ms["n"]))
            rows.append((layers, kept, found["lowering"], *figures))
        rows += [(layers, kept, name, why, "", "") for name, why in group["left_out"].items()]
    batches = sorted({group["batch"] for group in tuning["measured"]})
    return (
        lines(
            f"Measured at batch {', '.join(map(str, batches))} on {tuning['machine']}, "
            f"{tuning['runtime']} ({tuning['provider']}), {tuning['threads']} threads, "
            f"{tuning['inputs']}:"
        ),
        table(("MoE layer", "k/n", "lowering", "ms (median)", "spread", "calls"), rows),
        "",
    )
