"""Checks that a bundle is unchanged and computes PyTorch's results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from ...common.environment import cpu_features
from ...common.files import sha256
from ...data.batches import Feed
from ...errors import MissingExtraError, MoexportError, PluginError
from ...graphs.sizes import PARITY_BATCHES
from ...graphs.targets import TARGETS, Target, for_cpus, runtime_of
from ..session import CPU, CUDA, Session, SessionOptions, check_provider
from .manifest import (
    MANIFEST_FILE,
    Check,
    GraphFacts,
    GraphRecord,
    LayerFacts,
    Manifest,
    external_files,
    is_as_written,
    nodes_in,
)
from .parity import (
    PARITY_FILE,
    ROUNDED_RTOL,
    TOLERANCES,
    Comparison,
    Parity,
    Reference,
    Tolerance,
    describe,
    gpu_bounds,
    not_compared,
    sized_files,
    stored_bounds,
    tolerance_of,
)
from .runtimes import RUNTIMES, open_graph

AS_RECORDED = "SHA-256 as recorded"
CHANGED = "the content has changed"
NEVER_COMPARED = "the bundle was exported with --no-verify: no reference"

REFERENCE_MISSING = (
    f"{MANIFEST_FILE} records a comparison but does not list {PARITY_FILE}: it is incomplete"
)

LARGE_WEIGHTS_BYTES = 1 << 27
"""Above this size, checks run without copies of weights: slower, but in a third of the memory."""


def checks(
    directory: Path,
    manifest: Manifest,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    trust_engine: bool = False,
    data: Feed | None = None,
) -> Iterator[Check]:
    """Yields the checks: every file's hash, every graph's validity, every graph's parity.

    Every graph also runs `data` with labels or outputs of the user's own model. Engines that were
    built elsewhere only run with `trust_engine`. If a file is damaged, only hashes are checked:
    later checks would fail with less clear messages.
    """
    unchanged = is_as_written(directory)
    yield Check(f"hash of {MANIFEST_FILE}", unchanged, AS_RECORDED if unchanged else CHANGED)
    damaged = not unchanged
    for name, record in manifest.files.items():
        check = _hash_check(directory, name, record.sha256, record.bytes)
        damaged |= not check.passed
        yield check
    if damaged:
        return

    def on_gpus(graph: GraphRecord | None = None, *, tf32: bool = False) -> Tolerance:
        bounds = _bounds(directory, manifest, graph, atol, rtol)
        default_bounds = atol is None and rtol is None
        return gpu_bounds(bounds, manifest.precision, tf32=tf32) if default_bounds else bounds

    valid = []
    for graph in manifest.graphs:
        check = _graph_check(directory, manifest, graph)
        yield check
        if check.passed:
            valid.append(graph)
    expected = None
    if PARITY_FILE in manifest.files:
        expected = Reference.load(directory / PARITY_FILE)
        specs = {spec.name for spec in (*manifest.inputs, *manifest.outputs)}
        unknown = sorted({*expected.inputs, *expected.outputs} - specs)
        if unknown:
            yield Check("parity", False, f"{PARITY_FILE} has {unknown[0]!r}, but no graph does")
            return
        on_gpu = _runs_on_gpu(manifest)
        for graph in valid:
            bounds = _bounds(directory, manifest, graph, atol, rtol)
            yield _parity_check(directory, manifest, graph, expected, bounds)
            if on_gpu:
                yield _parity_check(directory, manifest, graph, expected, on_gpus(graph), CUDA)

    if manifest.engines:
        from ..tensorrt.verify import checks as engine_checks  # loaded if a bundle has an engine

        yield from engine_checks(directory, manifest, expected, on_gpus, trust=trust_engine)
    if expected is None:
        was_compared = manifest.parity or any(graph.parity for graph in manifest.graphs)
        yield Check("parity", False, REFERENCE_MISSING if was_compared else NEVER_COMPARED)
    if manifest.answers or data is not None:
        from ..checks.bundle import data_checks, recorded_checks  # few bundles have either

        yield from recorded_checks(manifest.answers)
        if data is not None:
            bounds = _bounds(directory, manifest, None, atol, rtol)
            sessions = {
                graph.file: partial(checking_session, directory / graph.file, manifest.target)
                for graph in valid
            }
            yield from data_checks(manifest, sessions, data, expected, bounds)


def missed_parity(directory: Path, manifest: Manifest, graph: GraphRecord) -> str | None:
    """Returns how a graph fails the comparison of its export.

    None if it passes, was never compared, or was exported with wider bounds.
    """
    if graph.parity is None or PARITY_FILE not in manifest.files:
        return None
    bounds = _bounds(directory, manifest, graph, None, None)
    if stored_bounds(manifest.parity, manifest.precision).wider_than(bounds):
        return None
    expected = Reference.load(directory / PARITY_FILE)
    check = _parity_check(directory, manifest, graph, expected, bounds)
    return None if check.passed else check.detail


def checking_session(
    graph: Path,
    target: Target,
    provider: str = CPU,
    *,
    observe: Mapping[str, int] | None = None,
    threads: int | None = None,
    rounded: bool | None = None,
) -> Session:
    """Returns a session of a graph, in a bundle or in one being written, to compare its values.

    With `rounded` it rounds 16-bit floats as a GPU does, not as this machine does; that is the
    default for targets that are not CPUs.
    """
    options = SessionOptions(
        provider,
        runtime=runtime_of(target),
        threads=threads,
        prepack=not is_large(graph.parent),
        plan_memory=False,
        observe=observe,
        rounded=not for_cpus(target) if rounded is None else rounded,
    )
    return open_graph(graph, options)


def is_large(directory: Path) -> bool:
    """Whether the graphs in a folder are too large to be open together with copies of weights."""
    weights = sum(file.stat().st_size for file in directory.glob("*.bin"))
    return weights * len(list(directory.glob("*.onnx"))) >= LARGE_WEIGHTS_BYTES


def _hash_check(directory: Path, file: str, expected: str, size: int) -> Check:
    name, path = f"hash of {file}", directory / file
    if not path.is_file():
        return Check(name, False, "the file is missing")
    trust = ""
    if path.suffix == ".plan":
        from ..tensorrt.trust import TRUST  # loaded if a bundle has an engine

        trust = f"; `moexport run` with {TRUST}"
    if path.stat().st_size != size:
        return Check(name, False, f"{path.stat().st_size} bytes, not {size}{trust}")
    unchanged = sha256(path) == expected
    return Check(name, unchanged, AS_RECORDED if unchanged else f"{CHANGED}{trust}")


def _graph_check(directory: Path, manifest: Manifest, graph: GraphRecord) -> Check:
    """Whether a graph is valid and whether it matches the manifest."""
    path = directory / graph.file
    name = f"ONNX check of {path.name}"
    if graph.file not in manifest.files:
        return Check(name, False, f"{MANIFEST_FILE} lists no hash for it")
    try:
        onnx.checker.check_model(str(path))
        model = onnx.load(path, load_external_data=False)
        difference = next(_differences(model, manifest, graph), None)
    except (onnx.checker.ValidationError, DecodeError, UnicodeDecodeError) as error:
        detail = str(error).strip().splitlines()[0]
        if "symbolic link" in detail:
            detail += " Copy the bundle with links followed: cp -rL"
        return Check(name, False, detail)
    except MoexportError as error:
        return Check(name, False, error.message)
    return Check(name, difference is None, difference or f"valid, {len(model.graph.node)} nodes")


def _differences(model: onnx.ModelProto, manifest: Manifest, graph: GraphRecord) -> Iterator[str]:
    """Yields how a graph differs from the manifest."""
    for file in sorted(external_files(model) - manifest.files.keys()):
        yield f"it keeps weights in {file}, for which {MANIFEST_FILE} lists no hash"
    takes_k = {"k"} if manifest.k == "input" else set()
    stored = {tensor.name for tensor in model.graph.initializer}
    for what, names, listed in (
        ("inputs", {value.name for value in model.graph.input} - stored, manifest.inputs),
        ("outputs", {value.name for value in model.graph.output}, manifest.outputs),
    ):
        expected = {spec.name for spec in listed} | (takes_k if what == "inputs" else set())
        if not expected <= names or (what == "inputs" and names != expected):
            yield f"its {what} are {_listed(names)}, but {MANIFEST_FILE} lists {_listed(expected)}"
    facts = GraphFacts.of(model, graph.file)
    if facts is None:
        yield "it has no moexport metadata"
        return
    for layer in manifest.layers:
        known = facts.layers.get(layer.name)
        k = "k" if layer.k is None else layer.k
        lowering = graph.lowerings.get(layer.name)
        if known != LayerFacts(n=layer.experts, k=k, lowering=str(lowering)):
            found = "does not name it"
            if known is not None:
                found = f"has {known.n} experts, k {known.k}, lowering {known.lowering}"
            yield (
                f"layer {layer.name}: {MANIFEST_FILE} lists {layer.experts} experts, k {k}, "
                f"lowering {lowering}, but the graph {found}"
            )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _bounds(
    directory: Path,
    manifest: Manifest,
    graph: GraphRecord | None,
    atol: float | None,
    rtol: float | None,
) -> Tolerance:
    """Returns the bounds of a comparison: those given, or those of the export.

    If any is given for FP32, `roundings` does not apply, as in an export. The manifest's bounds
    may not be wider than the defaults of the precision (`ROUNDED_RTOL` if the `graph` rounds to
    BF16): an edited manifest may contain anything.
    """
    limit = tolerance_of(manifest.precision)
    has_record = manifest.parity is not None
    bounds = stored_bounds(manifest.parity, manifest.precision) if has_record else limit
    fp32 = limit == TOLERANCES["fp32"]
    if fp32 and bounds.rtol > limit.rtol and graph is not None and _rounds(directory / graph.file):
        limit = replace(limit, rtol=ROUNDED_RTOL)
    bounds = bounds.narrower(limit)
    if fp32 and (atol, rtol) != (None, None):
        bounds = replace(bounds, roundings=math.inf)
    return bounds.with_user_bounds(atol, rtol)


def _rounds(path: Path) -> bool:
    """Whether a graph rounds values to BF16 internally, as some published code does."""
    return any(
        attribute.name == "to" and attribute.i == onnx.TensorProto.BFLOAT16
        for node in nodes_in(onnx.load(path, load_external_data=False).graph)
        if node.op_type == "Cast"
        for attribute in node.attribute
    )


def _parity_check(
    directory: Path,
    manifest: Manifest,
    graph: GraphRecord,
    expected: Reference,
    bounds: Tolerance,
    provider: str = CPU,
) -> Check:
    on_gpu = provider != CPU
    name = f"parity of {graph.file}{' on the GPU' if on_gpu else ''}"
    on_cpu = for_cpus(manifest.target)
    compare = partial(_compare_graph, directory, manifest, graph, expected, bounds, provider)
    try:
        parity = intended = compare(rounded=not on_gpu and not on_cpu)
        if on_cpu and not parity.passed and manifest.numbers.get("rest") == "fp16":
            intended = compare(rounded=True)
    except MoexportError as error:
        is_missing = isinstance(error, MissingExtraError | PluginError)
        return Check(name, False, error.message, error.hint if is_missing or on_gpu else None)
    detail = describe(parity)
    missing = not_compared(expected.compared(manifest.experts), manifest.experts)
    detail += f"; {missing}" if missing else ""
    if not on_gpu and bounds.rtol == ROUNDED_RTOL > tolerance_of(manifest.precision).rtol:
        detail += f"; the bound is {bounds.rtol:g} of max|y|, since the graph rounds to BF16"
    if not parity.passed:
        runtime = runtime_of(manifest.target)
        title = provider if runtime == "onnxruntime" else RUNTIMES[runtime].title
        detail += f"; computed by {title}" + ("" if on_gpu else f" on {cpu_features()}")
    if intended.passed and not parity.passed:
        detail += (
            f", which sums FP16 products in FP16: summed in FP32 and rounded to FP16, the graph is "
            f"correct ({describe(intended)}). Export it again: FP16 graphs for CPUs compute in FP32"
        )
    exported = stored_bounds(manifest.parity, manifest.precision)
    if not parity.passed and exported.wider_than(bounds):
        detail += (
            f"; it was exported with wider bounds than the default for {manifest.precision}: "
            f"`verify --atol {exported.atol:g} --rtol {exported.rtol:g}` compares with those"
        )
    return Check(name, parity.passed, detail)


def _runs_on_gpu(manifest: Manifest) -> bool:
    """Whether a bundle is for ONNX Runtime's CUDA provider, and this machine has it and a GPU."""
    if TARGETS[manifest.target].provider == CUDA:
        with suppress(MoexportError):
            check_provider(CUDA)
            return True
    return False


def _batches(manifest: Manifest, graph: GraphRecord) -> tuple[int, Sequence[int]]:
    """Returns the batch sizes of a comparison: one for all inputs, and others for the first inputs.

    They are those of the export or, if it recorded none, the smallest ones.
    """
    known, group = manifest.batches, manifest.group_size
    if known.fixed:
        return known.opt, ()
    sizes = (graph.parity or {}).get("batches", ())
    compared = [size for size in sizes if isinstance(size, int) and size > 0]
    return known.comparison_size(group), compared or [
        known.nearest(n * group) for n in PARITY_BATCHES
    ]


def _compare_graph(
    directory: Path,
    manifest: Manifest,
    graph: GraphRecord,
    expected: Reference,
    bounds: Tolerance,
    provider: str,
    rounded: bool,
) -> Parity:
    """Returns how far a graph is off on this machine; `rounded` as in `checking_session`."""
    path, observe = directory / graph.file, expected.observed(graph.selected)
    batch, probed = _batches(manifest, graph)
    comparison = Comparison(
        checking_session(path, manifest.target, provider, observe=observe, rounded=rounded),
        graph.selected,
        batch=batch,
        tolerance=bounds,
        k=expected.main_k if manifest.k == "input" else None,
        probed=probed,
        group_size=manifest.group_size,
    )
    comparison.add(expected)
    for tokens, file in sized_files(manifest.files).items():
        comparison.add_sized(Reference.load(directory / file), tokens)
    return comparison.parity()
