"""Options of ONNX Runtime's TensorRT provider: profiles, the folder of its engines, and no TF32.

The option names are those of "TensorRT Execution Provider" on onnxruntime.ai (read for 1.22).
"""

from __future__ import annotations

import os
from pathlib import Path

from ...common.environment import versions
from ...common.files import why_not_private
from ..bundle.manifest import MANIFEST_FILE, Manifest
from .backends import first_gpu
from .cache import default_cache, engine_key
from .engines import exported_ranges
from .profiles import Profile, profile

NO_TF32 = ("NVIDIA_TF32_OVERRIDE", "0")
"""The provider builds its engines with TF32 and has no option for it (issue 26029 of
microsoft/onnxruntime, open): NVIDIA's libraries read this variable once, when they are loaded."""


def provider_options(graph: Path) -> dict[str, str]:
    """Returns the provider's options for a graph of a bundle, and turns TF32 off.

    Engines are kept from one process to the next, in a folder that stands for these weights, this
    GPU and this version, since the provider itself looks at none of them. Where k is an input, one
    engine serves every k and batch of the export; without a profile each new k would build again.
    A variable that the user set stays.
    """
    os.environ.setdefault(*NO_TF32)
    if not (graph.parent / MANIFEST_FILE).is_file():
        return {}
    manifest = Manifest.read(graph.parent)
    options = _cache_options(manifest, graph.name)
    if manifest.k == "input":
        experts = min(layer.experts for layer in manifest.layers)
        ranges = profile(manifest.inputs[0], {}, exported_ranges(manifest), experts)
        options |= profile_options(ranges)
    return options


def profile_options(ranges: Profile) -> dict[str, str]:
    """Returns `trt_profile_min_shapes` and so on: of k, whose value is a size, that value."""
    found = {}
    for end in ("min", "opt", "max"):
        shapes = {ranges.input: "x".join(map(str, getattr(ranges, end)))}
        if ranges.k is not None:
            shapes["k"] = str(getattr(ranges.k, end))
        found[f"trt_profile_{end}_shapes"] = ",".join(f"{n}:{s}" for n, s in shapes.items())
    return found


def _cache_options(manifest: Manifest, graph: str) -> dict[str, str]:
    folder = default_cache()
    if folder is None or why_not_private(folder) is not None:  # an engine is code
        return {}
    own = {n: r.sha256 for n, r in manifest.files.items() if n == graph or n.endswith(".bin")}
    runtime = versions(("onnxruntime", "onnxruntime-gpu", "tensorrt"))
    place = folder / f"ort-{engine_key({'files': own, 'gpu': str(first_gpu()), **runtime})}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(place),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(place),
    }
