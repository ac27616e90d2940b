"""What two processes do at once in a test; imports little, since each process imports it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from moexport.exporter.bundle.manifest import FileRecord
from moexport.exporter.tensorrt import cache
from moexport.exporter.tensorrt.backends import TENSORRT_RTX
from moexport.exporter.tensorrt.records import EnginePlan, EngineRecord, add_to_bundle, staging
from moexport.exporter.tensorrt.worker import Compiled

TIMES = 100
KEY = "a" * 64


def add_engine(bundle: Path, number: int) -> None:
    """Adds an engine again and again, with other bytes each time."""
    plan, layers = f"engine-tensorrt-rtx-{number}.plan", f"engine-tensorrt-rtx-{number}.layers.json"
    facts: dict[str, Any] = {
        "device": None,
        "precision": {},
        "profiles": [],
        "options": {},
        "settings": {},
    }
    sizes = {"seconds": 0.0, "peak_memory_bytes": 0}
    names = {"file": plan, "graph": "model.onnx", "flavour": "tensorrt-rtx", "version": "1"}
    profile = {"input": [[1, 3, 32, 32]] * 3}
    record = EngineRecord(
        **{**names, **facts, **sizes, "compute_capabilities": [], "layers": layers, "key": "k"}
        | {"profiles": [profile]}
    )
    for turn in range(TIMES):
        with staging(bundle) as staged:
            files = {}
            for name in (plan, layers):
                content = f"{name} {turn}".encode()
                (staged / name).write_bytes(content)
                files[name] = FileRecord(hashlib.sha256(content).hexdigest(), len(content))
            engine = EnginePlan(
                graph=record.graph,
                file=plan,
                backend=TENSORRT_RTX,
                profiles=(),
                record=record,
                files=files,
            )
            add_to_bundle(bundle, [engine], staged)


def keep_and_take(folder: Path, number: int) -> None:
    """Keeps an engine of one key, as this process built it, and takes what is there."""
    plan, out = folder.parent / f"{number}.plan", folder.parent / f"{number}.out"
    content = bytes([number]) * 200_000
    plan.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    facts = Compiled(version=str(number), settings={}, layers=[], inspector=None)
    for _ in range(TIMES):
        cache.store(folder, KEY, plan, digest, facts)
        found = cache.fetch(folder, KEY, out)
        assert found is not None
        assert out.read_bytes() == bytes([int(found.version)]) * 200_000
