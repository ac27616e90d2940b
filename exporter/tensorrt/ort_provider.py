"""ONNX Runtime's TensorRT provider: its libraries, types, profiles and engine folder, without TF32.

The option names are those of "TensorRT Execution Provider" on onnxruntime.ai (read for 1.22).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path

from ...common.environment import versions
from ...errors import MissingExtraError
from ..bundle.manifest import MANIFEST_FILE, GraphFacts, Manifest
from .backends import TENSORRT, first_gpu
from .cache import engine_key, private_cache
from .engines import cap_gather_copies, exported_ranges
from .profiles import Profile, profile

NO_TF32 = ("NVIDIA_TF32_OVERRIDE", "0")
"""The provider builds its engines with TF32, and has no option to turn TF32 off (issue 26029 of
microsoft/onnxruntime, open). NVIDIA's libraries read this variable once, when they are loaded."""


PROVIDER_LIBRARY = "libonnxruntime_providers_tensorrt.so"

PIP_LIBRARIES = "tensorrt_libs"
"""The package in which pip installs TensorRT's libraries, where the loader does not search."""


def load_libraries(runtime: Path | None = None) -> None:
    """Loads the libraries that the provider is linked to; `MissingExtraError` if one is missing.

    They belong to one version of TensorRT: a provider that needs `libnvinfer.so.10` does not start
    with TensorRT 11. `runtime` is the folder with ONNX Runtime's libraries.
    """
    if sys.platform != "linux":
        return
    if runtime is None:
        from ...common.onnx_runtime import ort  # not needed for engines

        runtime = Path(ort.__file__).parent / "capi"
    for name in linked_libraries(runtime / PROVIDER_LIBRARY):
        folders = [Path(folder) for folder in _pip_folders()]
        paths = [str(folder / name) for folder in folders if (folder / name).is_file()]
        try:
            ctypes.CDLL(paths[0] if paths else name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            version = int(re.sub(r".*\.so\.", "", name))
            installed = versions(TENSORRT.distributions)
            other = f"; TensorRT {next(iter(installed.values()))} is installed" if installed else ""
            raise MissingExtraError(
                f"ONNX Runtime's TensorRT provider needs {name}, which cannot be loaded{other}",
                hint="in a separate environment: "
                + TENSORRT.install_version(f">={version},<{version + 1}"),
            ) from error


def linked_libraries(provider: Path) -> tuple[str, ...]:
    """Returns the names of the libraries of TensorRT to which a provider is linked, in order."""
    if not provider.is_file():
        return ()
    names = re.findall(rb"libnv(?:infer|onnxparser)[a-z_]*\.so\.\d+", provider.read_bytes())
    return tuple(sorted({name.decode() for name in names}))


def _pip_folders() -> list[str]:
    spec = importlib.util.find_spec(PIP_LIBRARIES)
    return [] if spec is None else [*(spec.submodule_search_locations or ())]


def provider_options(graph: Path) -> dict[str, str]:
    """Returns the provider's options for a graph of a bundle, and turns TF32 off.

    Engines are cached in a folder for these weights, this GPU and this version, because the
    provider does not check them itself. If k is an input, one engine serves every k and batch of
    the export; without a profile, each new k would cause another build. A TF32 variable set by the
    user is kept.
    """
    os.environ.setdefault(*NO_TF32)
    if not (graph.parent / MANIFEST_FILE).is_file():
        return {}
    manifest = Manifest.read(graph.parent)
    options = _cache_options(manifest, graph.name) | type_options(graph, manifest)
    if manifest.k == "input":
        experts = min(layer.experts for layer in manifest.layers)
        full = profile(manifest.inputs[0], {}, exported_ranges(manifest), experts)
        record = next(entry for entry in manifest.graphs if entry.file == graph.name)
        (ranges,), _ = cap_gather_copies(manifest, record, TENSORRT, [full], [{}])
        options |= profile_options(ranges)
    return options


WEAKLY_TYPED = (1, 27)
"""The first ONNX Runtime whose provider creates weakly typed networks in TensorRT 10.

Earlier versions use the types of the graph if no type is enabled. Pull request 29779 of
microsoft/onnxruntime, open in September 2026, explains why; the library of onnxruntime-gpu 1.31.1
creates every network without flags.
"""


def type_options(graph: Path, manifest: Manifest) -> dict[str, str]:
    """Returns the types, besides FP32, in which the provider may compute a graph.

    In a weakly typed network, TensorRT uses FP32 in place of types that are not enabled, and
    refuses QuantizeLinear unless INT8 is enabled. Enabled types are allowed everywhere, even in the
    router, whose FP32 is then only a preference.
    """
    import onnx

    from ...common.onnx_runtime import ort

    if tuple(int(part) for part in ort.__version__.split(".")[:2]) < WEAKLY_TYPED:
        return {}
    facts = GraphFacts.of(onnx.load(graph, load_external_data=False), graph.name)
    types = {layer.precision for layer in manifest.layers} | ({facts.floats} if facts else set())
    return {f"trt_{name}_enable": "1" for name in ("fp16", "bf16", "int8") if name in types}


def profile_options(ranges: Profile) -> dict[str, str]:
    """Returns `trt_profile_min_shapes` and so on; they contain the value of k, not a shape."""
    options = {}
    for end in ("min", "opt", "max"):
        shapes = {ranges.input: "x".join(map(str, getattr(ranges, end)))}
        if ranges.k is not None:
            shapes["k"] = str(getattr(ranges.k, end))
        options[f"trt_profile_{end}_shapes"] = ",".join(f"{n}:{s}" for n, s in shapes.items())
    return options


def _cache_options(manifest: Manifest, graph: str) -> dict[str, str]:
    folder = private_cache()
    if folder is None:
        return {}
    digests = {n: r.sha256 for n, r in manifest.files.items() if n == graph or n.endswith(".bin")}
    runtime = versions(("onnxruntime", "onnxruntime-gpu", "tensorrt"))
    subfolder = folder / f"ort-{engine_key({'files': digests, 'gpu': str(first_gpu()), **runtime})}"
    subfolder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(subfolder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(subfolder),
    }
