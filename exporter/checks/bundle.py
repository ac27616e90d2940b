"""Checks of a bundle on a user's data: its accuracy, and its distance from the user's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data.batches import LABEL, Feed, Fields, rebatched, row_count
from ...errors import FeedError
from ...graphs.names import K_INPUT
from ..bundle.manifest import Check, Manifest, TensorSpec
from ..bundle.parity import OUTLIERS, Reference, Tolerance
from ..session import Session
from .accuracy import (
    COUNT,
    Score,
    arrays_of,
    evaluate,
    fields_of,
    is_images_or_text,
    no_accuracy,
    output_names,
)
from .choices import CHOICES
from .drift import NAME as ROUTING
from .drift import drift_checks

BATCH = 16


@dataclass(frozen=True, slots=True)
class _Ports:
    """The inputs and outputs of a bundle, without k."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def input(self) -> TensorSpec:
        return self.inputs[0]


def recorded_checks(answers: Mapping[str, Any]) -> Iterator[Check]:
    """Yields the results of an export on its data, as the manifest records them."""
    scores = {
        "your own outputs": answers.get("own"),
        "PyTorch": answers.get("pytorch"),
        "PyTorch as exported": answers.get("pytorch_at_k"),
        **answers.get("graphs", {}),
    }
    texts = [f"{name} {Score(**found).text}" for name, found in scores.items() if found]
    if texts:
        yield Check("accuracy when it was exported", True, ", ".join(texts))
    own = answers.get("own_outputs")
    if own:
        yield Check(
            "PyTorch and your own model, when it was exported",
            True,
            f"max |difference| {own['max_abs']:.2g} ({own['max_rel']:.2g} of max|y|) over "
            f"{own['inputs']:,} inputs",
        )


def data_checks(
    manifest: Manifest,
    sessions: Mapping[str, Callable[..., Session]],
    data: Feed,
    expected: Reference | None,
    bounds: Tolerance,
) -> Iterator[Check]:
    """Yields the accuracy of each graph on labelled data, and its distance from a user's outputs.

    The last check compares the chosen experts with those of the export. `sessions` open the
    graphs, by their files.

    The distance is judged only if the graph computes the trained model; with fewer experts or with
    edits, the number of equal answers is reported. Raises `FeedError` for data that has neither
    labels nor outputs, or does not fit.
    """
    if is_images_or_text(data):
        raise FeedError(
            "--data: verify reads arrays, but these are image files",
            hint="save them as inputs of the model: np.savez(path, input=x, label=labels)",
        )
    ports = _Ports(
        tuple(spec for spec in manifest.inputs if spec.name != K_INPUT), tuple(manifest.outputs)
    )
    size, fixed = _batch(manifest)
    k = min(manifest.experts.values()) if manifest.k == "input" else None
    judged = _computes_the_model(expected, k)
    at_k = "" if k is None else f" with k = {k}"
    if isinstance(data, Iterator):
        data = tuple(fields_of(ports, data, COUNT))
    main = sessions.get(manifest.graphs[0].file)
    counted = main is not None and CHOICES in manifest.answers
    for file, open_session in sessions.items():
        session = open_session()

        def run(x: Fields, session: Session = session) -> Mapping[str, np.ndarray]:
            return session.run(x, k)

        found = evaluate(run, ports, data, size, fixed)
        if found is None and counted:
            break
        if found is None:
            raise _nothing_to_compare(manifest)
        if found.accuracy is not None:
            yield Check(f"accuracy of {file}", True, found.accuracy.text + at_k)
        if found.unscored is not None:
            advice = "classes are whole numbers from 0 to the number of outputs - 1"
            yield Check(f"accuracy of {file}", True, no_accuracy(found.unscored), advice)
        if len(found.apart):
            passed = not judged or _within(found.apart, bounds)
            detail = (
                f"at most {float(found.apart.max()):.2g} of max|y| apart; the largest output "
                f"is the same in {found.agreeing:,} of {found.inputs:,} inputs{at_k}"
            )
            detail += "" if judged else "; not judged: the graph has fewer experts, or edits"
            hint = None
            if not passed:
                hint = (
                    "was it exported with the settings of your model? export it again with this "
                    "--data, which compares PyTorch first"
                )
            yield Check(f"{file} and your own model", passed, detail, hint)
    if main is not None and counted:
        batches = _inputs(ports, data, size, fixed)
        yield from drift_checks(manifest, lambda observe: main(observe=observe), batches, expected)
    elif main is not None and manifest.layers:
        text, hint = "the export recorded no choices for its --data", None
        if _keeps_all(manifest):
            text = "every layer keeps all of its experts"
            hint = _COEFFICIENTS if _has_only_coefficients(manifest) else None
        yield Check(ROUTING, True, f"not compared: {text}", hint)


def _nothing_to_compare(manifest: Manifest) -> FeedError:
    nothing = ", and no layer chooses among its experts" if _keeps_all(manifest) else ""
    routing = f"; {_COEFFICIENTS}" if _has_only_coefficients(manifest) else ""
    return FeedError(
        f"--data has neither labels nor outputs of your own model{nothing}",
        hint="without --data, verify compares the bundle with PyTorch; np.savez(path, input=x, "
        f"label=labels, output=y) adds the accuracy and a comparison with your model{routing}",
    )


_COEFFICIENTS = "an export with --expose-routing and --data records coefficients to compare"


def _keeps_all(manifest: Manifest) -> bool:
    return all(layer.k == layer.experts for layer in manifest.layers)


def _has_only_coefficients(manifest: Manifest) -> bool:
    """Whether all experts are kept, and some have coefficients that could be compared."""
    return _keeps_all(manifest) and any(layer.kind == "mumoe" for layer in manifest.layers)


def _inputs(ports: _Ports, data: Feed, size: int, fixed: Mapping[str, int]) -> Iterator[Fields]:
    """Yields the inputs of a feed without labels and outputs, in batches that a graph accepts."""
    others = {LABEL, *output_names(ports)}
    for part in rebatched(fields_of(ports, data, COUNT), size):
        inputs = {name: array for name, array in part.items() if name not in others}
        if "batch" not in fixed or row_count(inputs) == size:
            yield arrays_of(inputs, ports, fixed)


def _within(apart: np.ndarray, bounds: Tolerance) -> bool:
    """Whether outputs are within the bounds, except for outliers that the precision allows."""
    if bounds.atol:  # absolute: these distances, which are relative, are not judged
        return True
    allowed = 1.0 - bounds.routing + (OUTLIERS if bounds.outlier > 1 else 0.0)
    return float((apart > bounds.rtol).mean()) <= allowed


def _computes_the_model(expected: Reference | None, k: int | None) -> bool:
    """Whether the compared outputs are those of the untouched model."""
    if expected is None:
        return False
    y = expected.y
    if k is not None and k != expected.main_k:
        if k not in expected.at_other_k:
            return False
        y = expected.at_other_k[k].y
    dense = expected.dense[: len(y)]
    return bool(np.abs(y - dense).max() <= 1e-5 * np.abs(dense).max())


def _batch(manifest: Manifest) -> tuple[int, dict[str, int]]:
    """Returns a batch size that every graph accepts, and the sizes of axes that are constants."""
    spec = manifest.inputs[0]
    if isinstance(spec.shape[0], int):
        return spec.shape[0], {"batch": spec.shape[0]}
    sizes = manifest.batches
    group = spec.groups_of or sizes.min
    size = group * max(1, min(BATCH, sizes.max) // group)
    return size, {"batch": size} if group > 1 else {}
