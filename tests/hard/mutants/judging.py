"""Who refuses a damaged bundle, and what the damage does to its outputs."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
from moexport.bench.data import LabelledData
from moexport.bench.evaluate import deviation_of, evaluate
from moexport.bench.request import BenchRequest
from moexport.bench.runners.candidates import from_bundle
from moexport.common.files import sha256
from moexport.errors import BundleError, EngineError, MoexportError, ParityError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import MANIFEST_FILE, FileRecord
from moexport.exporter.bundle.parity import (
    PARITY_FILE,
    TOLERANCES,
    Comparison,
    Reference,
    describe,
    sized_files,
)
from moexport.exporter.bundle.verify import checking_session
from moexport.exporter.inputs import repeated_indices
from moexport.exporter.reference import open_comparison
from moexport.graphs.targets import Precision

from .bases import Base
from .damage import DAMAGES, Graph


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a damaged graph.

    `effect` is the largest change of an output over max|y|, and `length` that of all outputs
    together, as a share of theirs; `rounding` and `rounding_length` tell the same of the undamaged
    graph beside PyTorch, and `apart` how far it is from another lowering (`Parity.apart`); `times`
    is the same of the damaged graph and the undamaged one, where one took it, and `elsewhere` the
    largest change at the other sizes that are compared. `export` and `verify` say why each refused
    it, None where it did not, and so does `bench`, where it was asked.
    """

    base: str
    precision: Precision
    damage: str
    where: str
    effect: float
    length: float
    rounding: float
    rounding_length: float
    apart: float | None
    times: float | None
    elsewhere: float | None
    export: str | None
    verify: str | None
    in_bench: bool = False
    bench: str | None = None

    @property
    def killed(self) -> bool:
        """Whether the comparison of an export and `verify` both refused it."""
        return self.export is not None and self.verify is not None

    @property
    def below_rounding(self) -> bool:
        """Whether it changes the graph by no more than rounding does.

        The damaged graph is compared with the undamaged one as that is with what its numbers should
        give (`Tolerance.roundings`). In FP32 an inexact lowering has its bound alone, 1e-4 of
        max|y|. At other sizes it changes that much at the most, or twice what it does at this one.
        """
        least = max(TOLERANCES["fp32"].rtol, 2 * max(self.effect, self.rounding))
        if self.elsewhere is not None and self.elsewhere > least:
            return False
        if self.apart is None and self.precision == "fp32":
            return self.effect <= TOLERANCES["fp32"].rtol
        return self.times is not None and (
            self.times <= TOLERANCES[self.precision].roundings + (self.apart or 0.0)
        )

    @property
    def survives(self) -> bool:
        """Whether somebody took it although it changes more than rounding does."""
        return not self.killed and not self.below_rounding

    def line(self) -> str:
        """One line about it."""
        took = [name for name in ("export", "verify") if getattr(self, name) is None]
        return (
            f"SURVIVES {' and '.join(took)}: {self.base}: {self.damage}: {self.where}: effect "
            f"{self.effect:.1e}, {self.length:.1e}; rounding {self.rounding:.1e}, "
            f"{self.rounding_length:.1e}; at other sizes {self.elsewhere or 0.0:.1e}"
        )


def mutants(
    base: Base, folder: Path, most: int, *, bench: bool = False
) -> tuple[list[Verdict], list[str]]:
    """Returns what became of the damaged graphs of a bundle, and the damage that ends a run.

    Each damage is done in `most` places at the most, spread over the graph, or in `every` one. With
    `bench` the row of a benchmark is judged, too.
    """
    if bench:
        wrong_row = by_bench(base, base.bundle)
        assert wrong_row is None, wrong_row
    graph = whole_graph(base)
    right, refused = by_export(base, base.bundle)
    assert right is not None and refused is None, refused
    rounding = furthest(given(right), [one.y for one in _at_each_k(base.expected)])
    known = right
    if base.precision == "fp32":  # as close to what is exact as rounding allows
        others = {k: _as_exact(one) for k, one in right.at_other_k.items()}
        known = replace(_as_exact(right), at_other_k=others)
    beside, right_elsewhere = replace(base, expected=known), elsewhere(base, base.bundle)
    apart = (base.bundle.manifest.parity or {}).get("apart")
    verdicts: list[Verdict] = []
    broken: list[str] = []
    for damage in DAMAGES:
        places = list(damage.places(graph))
        count = len(places) if damage.every else min(most, len(places))
        for where, change in [places[i * len(places) // count] for i in range(count)]:
            changed = graph.copy()
            change(changed)
            bundle = damaged_bundle(base, changed, folder)
            try:
                y, refused = by_export(base, bundle)
            except (BundleError, EngineError):
                broken.append(damage.name)
                continue
            at_verify = by_verify(bundle)
            times = at_others = None
            if refused is None or at_verify is None:
                times = compared(beside, bundle).parity().apart
                at_others = change_of(elsewhere(base, bundle), right_elsewhere)
            verdicts.append(
                Verdict(
                    base.name,
                    base.precision,
                    damage.name,
                    where,
                    *((math.inf, math.inf) if y is None else furthest(given(y), given(right))),
                    *rounding,
                    apart,
                    times,
                    at_others,
                    refused,
                    at_verify,
                    bench,
                    by_bench(base, bundle) if bench else None,
                )
            )
    return verdicts, broken


def whole_graph(base: Base) -> Graph:
    """Returns a bundle's graph with its weights inside."""
    model = onnx.load(base.bundle.path / base.bundle.manifest.graphs[0].file)
    return Graph(model, base.sizes)


def damaged_bundle(base: Base, graph: Graph, folder: Path) -> Bundle:
    """Writes the bundle with another graph, its hashes right, so that they hide nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest, file = base.bundle.manifest, base.bundle.manifest.graphs[0].file
    onnx.save(graph.model, folder / file)
    for record in (PARITY_FILE, *sized_files(manifest.files).values()):
        shutil.copy(base.bundle.path / record, folder / record)
    files = {path.name: FileRecord(sha256(path), path.stat().st_size) for path in folder.iterdir()}
    manifest = replace(manifest, files=files)
    (folder / MANIFEST_FILE).write_text(manifest.to_json())
    return Bundle(folder, manifest)


def opened(base: Base, bundle: Bundle) -> Comparison:
    """Returns the comparison that an export makes of a graph, at its sizes of batches."""
    graph = bundle.manifest.graphs[0]
    return open_comparison(base.job, bundle.path, graph, base.expected, batches(base))


def compared(base: Base, bundle: Bundle) -> Comparison:
    """Returns that comparison with the inputs of the bundle's record."""
    comparison = opened(base, bundle)
    comparison.add(base.expected)
    return comparison


def batches(base: Base) -> list[int]:
    """Returns the sizes of batches that the export compared."""
    parity = base.bundle.manifest.graphs[0].parity
    return [] if parity is None else list(parity["batches"])


def by_tokens(base: Base) -> dict[int, Reference]:
    """Returns what the export compared at other numbers of tokens than its inputs have."""
    files = sized_files(base.bundle.manifest.files)
    return {tokens: Reference.load(base.bundle.path / file) for tokens, file in files.items()}


def by_export(base: Base, bundle: Bundle) -> tuple[Reference | None, str | None]:
    """Returns what a graph gives (`given`), and why the comparison of an export refuses it.

    There is nothing given where it chose in another shape, and no reason where it is not refused.
    Raises `EngineError` or `BundleError` for a graph that does not run; at other sizes than those
    of its inputs that is a reason.
    """
    y, comparison = None, opened(base, bundle)
    try:
        y = comparison.with_rounded(base.expected)
        comparison.add(base.expected)
    except ParityError as error:
        return y, error.message
    except EngineError as error:
        if y is None:
            raise
        return y, error.message
    return y, _missed(base, comparison)


def _missed(base: Base, comparison: Comparison) -> str | None:
    """Why an export refuses what was compared, or the graph at another number of tokens."""
    parity = comparison.parity()
    if not parity.passed:
        return describe(parity)
    for tokens, expected in by_tokens(base).items():
        try:
            if not comparison.add_sized(expected, tokens):
                return describe(comparison.parity())
        except MoexportError as error:
            return f"with {tokens} tokens it does not run: {error.message}"
    return None


def elsewhere(base: Base, bundle: Bundle) -> list[np.ndarray]:
    """Returns what a graph gives at the other sizes that its export compared.

    There is nothing given where it does not run.
    """
    expected, manifest = base.expected, bundle.manifest
    path, threads = bundle.path / manifest.graphs[0].file, torch.get_num_threads()
    session = checking_session(path, manifest.target, threads=threads)
    count, together = len(expected.x), base.model.batch_of
    inputs = [expected.rows(repeated_indices(count, size, together)) for size in batches(base)]
    k = expected.main_k if manifest.k == "input" else None
    found = []
    for one in (*inputs, *by_tokens(base).values()):
        try:
            given = session.run(one.feeds(session.input_name), k)
        except EngineError:
            found.append(np.empty(0))
        else:
            found.append(given[session.output_names[0]])
    return found


def change_of(outputs: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Returns the largest change of an output over max|y|, 0 without any."""
    return furthest(outputs, wanted)[0] if wanted else 0.0


def by_verify(bundle: Bundle) -> str | None:
    """Returns the first check of `verify` that fails, None where all pass."""
    return next((f"{c.name}: {c.detail}" for c in bundle.verify() if not c.passed), None)


def by_bench(base: Base, bundle: Bundle) -> str | None:
    """Returns the error of a row that ONNX Runtime has in a benchmark of a bundle, if it has one.

    The data are the inputs of the bundle's comparison.
    """
    request = BenchRequest(engine="onnxruntime")
    candidate = from_bundle(bundle, request, model=base.model)
    ((case, graph),) = ((c, g) for c, g in candidate.cases.items() if g is not None)
    try:
        opened = graph.loader()
    except ParityError as error:
        return error.message
    if base.model.input.dtype == "int64":  # text: what is refused is refused when it is opened
        return None
    data = LabelledData(base.expected.x, None, others=base.expected.inputs)
    with opened as runner:
        state = evaluate({case: runner}, candidate, data, len(base.expected.x))
    if case.label in state.failures:
        return state.failures[case.label]
    return deviation_of(case, state.sums[case.label], graph.bounds)


def _as_exact(one: Reference) -> Reference:
    assert one.rounded is not None
    return replace(one, rounded=replace(one.rounded, y=one.rounded.y.astype(np.float64)))


def given(one: Reference) -> list[np.ndarray]:
    """Returns what a graph gave (`Comparison.with_rounded`) with each k."""
    return [each.rounded.y for each in _at_each_k(one) if each.rounded is not None]


def furthest(outputs: list[np.ndarray], wanted: list[np.ndarray]) -> tuple[float, float]:
    """Returns the `distance` of outputs with the k with which it is largest."""
    return max(distance(y, right) for y, right in zip(outputs, wanted, strict=True))


def _at_each_k(one: Reference) -> list[Reference]:
    return [one, *one.at_other_k.values()]


def distance(y: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Returns how far outputs are off: in their largest number, and in the length of all."""
    if y.shape != wanted.shape or not np.isfinite(y).all():
        return float("inf"), float("inf")
    off = y.astype(np.float64) - wanted
    length = float(np.linalg.norm(wanted.astype(np.float64)))
    largest = float(np.abs(wanted).max())
    return float(np.abs(off).max()) / largest, float(np.linalg.norm(off)) / length
