"""The bundles that are damaged: every family, kind of adapter and token-routed model, small."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx_ir as ir
from moexport.errors import LoweringError, MoexportError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.parity import PARITY_FILE, Reference
from moexport.exporter.export import write_bundle
from moexport.exporter.job import ExportJob, export_job
from moexport.exporter.model import Model
from moexport.exporter.options import ExportOptions
from moexport.exporter.trace import trace
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.sizes import BATCH, DEFAULT_BATCH, DEFAULT_TOKENS, AxisRange
from moexport.graphs.targets import Precision, Target
from moexport.plugins.own_layers.tests import test_adapters, test_own_forward, test_own_routers
from moexport.plugins.token_routed.tests.test_vmoe_vit import read_case as read_jax_case
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case

FORMS: tuple[tuple[Precision, Target], ...] = (
    ("fp32", "onnx"),
    ("fp32", "ort-cpu"),
    ("fp16", "onnx"),
    ("bf16", "onnx"),
    ("int8", "ort-cpu"),
    ("int8", "onnx"),
    ("int4", "ort-cpu"),
    ("int4", "onnx"),
)
"""What ONNX Runtime's CPU provider runs or `verify` emulates there. A lowering in a precision is
damaged for the first target that it serves."""

OPENVINO: tuple[tuple[Precision, Target], ...] = (("fp32", "openvino"), ("int8", "openvino"))
"""What OpenVINO runs here, of the models whose name says so."""

IN_BENCH: tuple[tuple[Precision, Target], ...] = (("fp32", "onnx"), ("int8", "ort-cpu"))
"""What a benchmark's row is judged of, too: what ONNX Runtime's CPU provider runs by itself."""

BLOCKED_OPSET = 21

VMOE: dict[str, dict[str, Any]] = {
    "vmoe": {},
    "vmoe priority": {"batch_priority": True},
    "vmoe experts choose": {"router": "NoisyTopItemsPerExpertRouter", "group_size": 17},
}
"""Settings beside those of a recorded run of V-MoE, by the name of the model."""

ROUTED = ("mixtral", "olmoe", "qwen2_moe")

SIZES: dict[str, tuple[AxisRange, AxisRange]] = {
    "soft_moe_lucidrains": (AxisRange(1, 8, 32), AxisRange(3, 12, 40)),
    "soft_moe_vit": (AxisRange(3, 8, 33), DEFAULT_TOKENS),
    "mumoe_cp_block_ln": (AxisRange(1, 8, 32), AxisRange(2, 12, 40)),
    "adapter own forward": (AxisRange(2, 8, 20), AxisRange(3, 6, 24)),
    "mixtral": (AxisRange(2, 4, 9), AxisRange(4, 24, 40)),
}
"""The batches and tokens for which models are exported whose sizes are damaged, too."""


@dataclass(frozen=True)
class Subject:
    """A model, its name, the k that it is exported with and inputs for it, None for random ones.

    `tiny`: those are random in FP32, too, where they hold tiny tokens (`exporter.inputs.TINY`).
    `batch` and `tokens` are the sizes that it is exported for.
    """

    name: str
    model: Model
    k: int | str
    data: dict[str, np.ndarray] | None
    renormalize: bool = False
    tiny: bool = False
    forms: tuple[tuple[Precision, Target], ...] = FORMS
    batch: AxisRange = DEFAULT_BATCH
    tokens: AxisRange = DEFAULT_TOKENS


@dataclass(frozen=True)
class Base:
    """A bundle of one graph that is right, with what its export compared it with."""

    subject: str
    lowering: str
    precision: Precision
    target: Target
    model: Model
    job: ExportJob
    bundle: Bundle
    expected: Reference

    @property
    def name(self) -> str:
        return f"{self.subject} {self.lowering} {self.precision} {self.target}"

    @property
    def form(self) -> tuple[Precision, Target]:
        return self.precision, self.target

    @property
    def sizes(self) -> dict[str, AxisRange]:
        """The sizes of axes that were asked for: those of others are not damaged."""
        options = self.job.options
        usual = {
            BATCH: options.batches == DEFAULT_BATCH,
            "tokens": options.token_counts == DEFAULT_TOKENS,
        }
        return {axis: sizes for axis, sizes in self.job.axis_ranges.items() if not usual[axis]}


@contextmanager
def _importable(folder: Path, name: str, code: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def subjects(folder: Path) -> dict[str, Any]:
    """Returns what makes each subject, by name; nothing is loaded before it is called."""
    found: dict[str, Any] = {}
    for name in SOFT_MOE:
        found[name] = lambda name=name: _recorded(name)
    found["soft_moe_lucidrains renormalised"] = lambda: _recorded(
        "soft_moe_lucidrains", renormalize=True
    )
    for name in MUMOE:
        found[name] = lambda name=name: _recorded(name)
    for form in ("full", "tucker"):
        found[f"adapter MuMoE {form}"] = lambda form=form: _own(folder, "mumoe", form=form)
    found["adapter SoftMoE"] = lambda: _own(folder, "soft")
    found["adapter Experts"] = lambda: _own_router(folder)
    for title, settings in VMOE.items():
        found[title] = lambda title=title, settings=settings: _vmoe(title, settings)
    found["adapter own forward"] = _own_forward
    for name in ROUTED:
        found[name] = lambda name=name: _routed(name, folder)
    for name in ("soft_moe_lucidrains", "mumoe_cp_2level", "adapter own forward"):
        made = found[name]
        found[f"any k {name}"] = lambda name=name, made=made: replace(
            made(), name=f"any k {name}", k="input"
        )
    for name in ("soft_moe_vit", "mumoe_tr", "vmoe"):
        made = found[name]
        found[f"openvino {name}"] = lambda name=name, made=made: replace(
            made(), name=f"openvino {name}", forms=OPENVINO
        )
    for name, (batch, tokens) in SIZES.items():
        made = found[name]
        found[f"sizes {name}"] = lambda name=name, made=made, batch=batch, tokens=tokens: replace(
            made(), name=f"sizes {name}", batch=batch, tokens=tokens
        )
    return found


def _recorded(name: str, *, renormalize: bool = False) -> Subject:
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config)
    x = case.x.astype(np.float32 if case.x.dtype.kind == "f" else np.int64)
    title = f"{name} renormalised" if renormalize else name
    data = {model.input.name: x}
    return Subject(title, model, case.ks[0], data, renormalize, name in SOFT_MOE)


def _vmoe(title: str, settings: dict[str, Any]) -> Subject:
    case = read_jax_case("jax_vmoe_last2_k2")
    sets = [f"{key}={value}" for key, value in settings.items()]
    model = moexport.load(case.index, config=case.config, sets=sets)
    return Subject(title, model, "n", {model.input.name: case.x(16)})


def _own_forward() -> Subject:
    model = test_own_forward.loaded(test_own_forward.bank(test_own_forward.right))
    x = np.random.default_rng(1).standard_normal((12, 6, test_own_forward.DIM))
    return Subject("adapter own forward", model, 2, {model.input.name: x.astype(np.float32)})


def _own(folder: Path, factory: str, **given: Any) -> Subject:
    x = np.random.default_rng(0).standard_normal((12, 6, 3)).astype(np.float32)
    with _importable(folder / "own", "own", test_adapters.CODE):
        adapter = "own:adapt" if factory == "soft" else "own:for_tensors"
        model = moexport.load(f"own:{factory}", config=given, adapter=adapter, example=x)
    kind = {"soft": "SoftMoE", "mumoe": "MuMoE"}[factory]
    title = " ".join(["adapter", kind, *given.values()])
    return Subject(title, model, 2, {model.input.name: x})


def _own_router(folder: Path) -> Subject:
    x = np.random.default_rng(0).standard_normal((8, 6, 3)).astype(np.float32)
    with _importable(folder / "routed", "routed", test_own_routers.CODE):
        model = moexport.load("routed:net", example=x)
    return Subject("adapter Experts", model, "n", {model.input.name: x})


def _routed(name: str, folder: Path) -> Subject:
    from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save

    place = folder / "models" / name
    if not place.exists():
        save(
            ARCHITECTURES[name],
            place,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=64,
        )
    return Subject(name, moexport.load(place), "n", None)


def bases(
    subject: Subject,
    folder: Path,
    forms: Sequence[tuple[Precision, Target]] | None = None,
    lowerings: Sequence[str] | None = None,
) -> Iterator[Base | str]:
    """Yields a bundle for each lowering, precision and target that serve a subject's layers.

    Of all its forms, where none are given.
    Of what an export refuses it yields the reason, but not where a lowering is not for the layers.
    """
    model = subject.model
    kind = next(iter(model.layers.values())).spec.kind
    traces: dict[int, ir.Model] = {}
    done: set[tuple[str, Precision]] = set()
    for precision, target in subject.forms if forms is None else forms:
        for lowering in lowerings or lowerings_of(kind):
            if (lowering, precision) in done:
                continue
            name = f"{subject.name} {lowering} {precision} {target}"
            place = folder / name.replace(" ", "-")
            random = subject.tiny and precision == "fp32"
            options = ExportOptions(
                k=subject.k,
                target=target,
                batch=subject.batch,
                tokens=subject.tokens,
                lowering=lowering,
                renormalize=subject.renormalize,
                precision=precision,
                data=None if random or subject.data is None else [subject.data],
                destination=place,
            )
            try:
                job = export_job(model, options)
                opset, sizes = job.options.least_opset, job.traced_sizes
                if opset not in traces:
                    traces[opset] = trace(job.model, opset=opset, fixed=job.fixed, sizes=sizes)
                bundle = write_bundle(job, traced=traces[opset])
            except LoweringError:
                continue
            except MoexportError as error:
                yield f"{name}: {error.message}"
                continue
            done.add((lowering, precision))
            expected = Reference.load(place / PARITY_FILE)
            yield Base(subject.name, lowering, precision, target, model, job, bundle, expected)
