"""Registers the readers of JAX checkpoints with the core."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...exporter.checkpoints.readers import Reader
from .orbax_files import read_state, state_in
from .vmoe_files import INDEX, read_index

API = 1


def _index_at(source: Path) -> Path | None:
    """Returns the google-research/vmoe index for a path: the file, its prefix or its folder."""
    if source.is_dir():
        found = sorted(source.glob(f"*{INDEX}"))
        if len(found) > 1:
            names = ", ".join(path.name for path in found[:6])
            raise CheckpointError(
                f"{source}: {len(found)} files could be the weights ({names})",
                hint="pass the path of one of them",
            )
        return found[0] if found else None
    if source.name.endswith(INDEX):
        return source if source.exists() else None
    index = source.with_name(source.name + INDEX)
    return index if not source.exists() and index.is_file() else None


VMOE = Reader(
    "vmoe",
    f"*{INDEX}",
    _index_at,
    read_index,
    lambda file: [shard.name for shard in read_index(file).shards],
)

ORBAX = Reader("orbax", "an Orbax state", state_in, read_state, lambda _: ())
