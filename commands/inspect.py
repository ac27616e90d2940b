"""The command `inspect`, and the text of models, bundles and engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..common.console import show
from ..common.libraries import check_pytorch
from ..common.text import by_level, count, first_and_count, lines, size, table
from ..errors import UsageError
from ..exporter.requests import InspectRequest, RunRequest
from ..graphs.targets import CUDA_PROVIDER, TARGETS
from .options import (
    READING,
    ModelArgument,
    json_text,
    option_for,
    options_of,
    parse_feed,
    refuse_idle,
)
from .printing import Printing
from .reading import LOADING

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import Manifest, Tuning
    from ..exporter.inspect import ModelReport


OPTIONS = options_of(
    InspectRequest,
    {READING: (*LOADING, "data", "tokens")},
    data={"metavar": "FEED", "kind": str, "parser": parse_feed},
    **LOADING,
)


def inspect(
    *,
    model: ModelArgument,
    request: Annotated[InspectRequest, OPTIONS],
    trust_engine: Annotated[bool, option_for(RunRequest, "trust_engine")] = False,
    printing: Printing,
) -> None:
    """Show a model's family and MoE layers, and what each k costs.

    For a bundle, its layers and files. For an engine, its layers, precisions and profiles.
    """
    from ..common.locations import url_of
    from ..exporter.bundle.manifest import is_bundle

    plan = model.endswith(".plan")
    bundle = not plan and is_bundle(model)
    if plan or bundle:
        what = "an engine" if plan else "a bundle"
        why = f"it describes how to read a checkpoint, but {model} is {what}"
        refuse_idle(request, why=why, but=("data",))
    if request.data is not None and (plan or bundle):
        raise UsageError(
            f"--data: inspect runs only checkpoints, but {model} is {what}",
            hint="leave --data out"
            + ("; `moexport verify --data` runs a bundle" if bundle else ""),
        )
    if trust_engine and not plan:
        raise UsageError("--trust-engine: no engine is loaded", hint="name an engine's .plan file")
    if plan:
        from ..exporter.tensorrt.plan_file import engine_facts

        facts = engine_facts(Path(model), trust=trust_engine)
        show(json_text(facts) if printing.as_json else engine_text(facts))
        return
    if bundle:
        from ..exporter.bundle.manifest import Manifest, local_bundle

        manifest = Manifest.read(local_bundle(model))
        if printing.as_json:
            show(manifest.to_json(), end="")
        else:
            show(bundle_text(url_of(model) or model, manifest))
        return
    check_pytorch("inspecting a model")
    from ..exporter.inspect import inspect as inspect_model

    with printing.console() as console:
        contents = inspect_model(model, replace(request, progress=console))
    show(json_text(contents.as_json()) if printing.as_json else model_text(contents))


FORMS = {"cp": "CP", "tr": "TR", "tucker": "Tucker", "full": "unfactorised", "matrix": "merged"}

MUMOE_HEADER = (
    *("MoE layer", "levels", "experts", "form", "ranks", "rank of an expert", "dim d", "hidden h"),
    *("out o", "tokens m", "parameters"),
)

LAYER_HEADER = ("MoE layer", "experts n", "slots p", "dim d", "hidden h", "tokens m", "parameters")


def model_text(report: ModelReport) -> str:
    """Returns the output of `inspect` for a model: family, layers and the cost of each k."""
    config = ", ".join(f"{key}={value}" for key, value in report.config.items())
    compute = f"compute     {count(2 * report.moe_macs)} FLOPs of MoE layers for one input"
    if report.macs is not None:
        compute = (
            f"compute     {count(2 * report.macs)} FLOPs for one input ({count(report.macs)} "
            f"multiply-adds), {count(2 * report.moe_macs)} in MoE layers"
        )
    return "\n".join(
        (
            lines(
                f"family      {report.family}",
                *([f"config      {config}"] if config else []),
                f"input       {report.input}",
                f"output      {report.output}",
                f"parameters  {count(report.parameters)}, {count(report.moe_parameters)} in MoE "
                "layers",
                compute,
                *(f"note        {note}" for note in report.notes),
                *(f"data        {text}" for text in report.answers),
            ),
            "",
            "\n\n".join(_layer_tables(report)),
            "",
            "All MoE layers, one input:",
            table(
                ("k", "multiply-adds", "of all", "expert weights read", "of all"), _costs(report)
            ),
            *_equivalents_text(report),
            *_support_text(report),
        )
    )


def _layer_tables(report: ModelReport) -> Iterator[str]:
    """Yields a table of layers with full expert matrices, and one of factorised layers."""
    full = [
        (r.name, r.experts, r.slots, r.dim, r.hidden, r.tokens, count(r.parameters))
        for r in report.layers
        if r.form is None
    ]
    if full:
        yield table(LAYER_HEADER, full)
    factored = [
        (
            r.name,
            by_level(r.levels) or "merged",
            f"{r.combinations:,}",
            FORMS.get(r.form, r.form),
            "; ".join(", ".join(map(str, ranks)) for ranks in dict.fromkeys(r.ranks)) or "–",
            r.expert_rank,
            *(r.dim, r.hidden or "–", r.out, r.tokens),
            count(r.parameters),
        )
        for r in report.layers
        if r.form is not None
    ]
    if factored:
        yield table(MUMOE_HEADER, factored)


def _costs(report: ModelReport) -> list[tuple[str, ...]]:
    """Returns a row for each k; consecutive rows of equal work are merged."""
    rows: list[tuple[str, ...]] = []
    for (macs, nbytes), group in groupby(report.costs, lambda c: (c.macs, c.expert_bytes)):
        equal = list(group)
        first, last = equal[0], equal[-1]
        label = first.k if first is last else f"{first.k} to {last.k}"
        shares = f"{first.macs_share:.0%}", f"{first.bytes_share:.0%}"
        rows.append((label, count(macs), shares[0], size(nbytes), shares[1]))
    return rows


def _equivalents_text(report: ModelReport) -> tuple[str, ...]:
    """Returns the costs of muMoE layers in other forms; equal layers share a row."""
    by_forms: dict[tuple[tuple[str, int, int], ...], list[str]] = {}
    for layer in dict.fromkeys(entry.layer for entry in report.equivalents):
        group = [entry for entry in report.equivalents if entry.layer == layer]
        by_forms.setdefault(tuple((e.form, e.parameters, e.macs) for e in group), []).append(layer)
    if not by_forms:
        return ()
    rows = []
    for forms, names in by_forms.items():
        name = first_and_count(names)
        rows += [(name, form, count(p), count(2 * macs)) for form, p, macs in forms]
    header = ("muMoE layer", "form", "parameters", "FLOPs of one token")
    notes = (
        "one level: the same number of experts and ranks in one level; dense: a matrix per expert; "
        "linear: no experts"
    )
    return ("", "In other forms:", table(header, rows), notes)


def _support_text(report: ModelReport) -> tuple[str, ...]:
    """Returns the table of nonzero coefficients, if they were counted."""
    if not report.support:
        return ()
    header = ("muMoE layer", "level", "experts n", "tokens", "mean", "p99", "max")
    rows = [
        (r.layer, r.level, r.experts, r.tokens, f"{r.mean:.1f}", f"{r.p99:.0f}", r.max)
        for r in report.support
    ]
    return ("", "Nonzero coefficients (k = max gives the same output):", table(header, rows))


def bundle_text(path: str | Path, manifest: Manifest) -> str:
    """Returns the output of `inspect` for a bundle."""
    from ..graphs.edits import Edits

    edits = Edits.from_records(manifest.edits, "manifest.json")
    layers = [(r.name, r.of_experts, r.kept, r.lowering, r.reason) for r in manifest.layers]
    tensors = (
        f"{label:12}{spec.name} {spec.dtype} ({', '.join(map(str, spec.shape))})"
        for label, specs in (("input", manifest.inputs), ("output", manifest.outputs))
        for spec in specs
    )
    files = [(name, record.bytes) for name, record in manifest.files.items()]
    notes = (*manifest.notes, *backbone_departures(manifest), *not_replayed(path, manifest))
    peak = manifest.peak_memory_bytes
    return "\n".join(
        (
            lines(
                f"bundle      {path} (moexport {manifest.moexport}, {manifest.created})",
                f"source      {manifest.source.path} ({manifest.source.family})",
                f"target      {manifest.target}, {manifest.precision}, opset {manifest.opset}",
                *([] if peak is None else [f"memory      at most {size(peak)} for one input"]),
                *(f"edited      {text}" for text in edits.texts()),
                *tensors,
                *(f"note        {note}" for note in notes),
            ),
            "",
            table(("MoE layer", "experts n", "kept k", "lowering", "reason"), layers),
            "",
            precisions_text((r.name, r.precision, r.precision_reason) for r in manifest.layers),
            "",
            *tuning_text(manifest.tuning),
            table(("file", "bytes"), files),
        )
    )


def not_replayed(path: str | Path, manifest: Manifest) -> Iterator[str]:
    """Yields the known reasons why graphs for CUDA are not replayed as CUDA graphs."""
    from ..exporter.bundle.gpu_runs import capture_refused
    from ..exporter.bundle.manifest import local_bundle

    on_cuda = {target.name for target in TARGETS if target.provider == CUDA_PROVIDER}
    if manifest.target not in on_cuda:  # or the plugin of the target is missing
        return
    for graph in manifest.graphs:
        reason = capture_refused(local_bundle(path) / graph.file)
        if reason is not None:
            yield f"{graph.file} is not replayed as a CUDA graph: {reason}"


def engine_text(facts: Mapping[str, Any]) -> str:
    """Returns the output of `inspect` for an engine (`engine_facts`)."""
    head = [
        f"engine      {facts['file']} ({size(facts['bytes'])})",
        f"built by    {facts['flavour']} {facts['version'] or '(unknown version)'}",
    ]
    layer_table = []
    if "graph" in facts:
        from ..exporter.tensorrt.profiles import Profile

        cards = ", ".join(facts["compute_capabilities"])
        head += [
            f"from        {facts['graph']}",
            f"runs on     {facts['device'] or 'compute capability'} {cards}",
            f"took        {facts['seconds']:.1f} s, at most {size(facts['peak_memory_bytes'])}",
            *(f"profile     {Profile.from_json(profile)}" for profile in facts["profiles"]),
            f"settings    {', '.join(f'{k}={v}' for k, v in facts['settings'].items())}",
            "products    " + ", ".join(f"{n} in {name}" for name, n in facts["precision"].items()),
        ]
        layers = [(layer["name"], layer["kind"], layer["precision"]) for layer in facts["layers"]]
        layer_table = ["", table(("layer", "kind", "precision"), layers)]
    source = {
        "header": "Read from the file's header; other facts need the manifest or an NVIDIA GPU.",
        "record": "Recorded by the build; reading the engine itself needs an NVIDIA GPU.",
        "engine": "The engine was loaded; --json includes the report of TensorRT's inspector.",
    }[facts["read_from"]]
    if "not_loaded" in facts:
        why = f"Not loaded: {facts['not_loaded']}."
        source += f"\n{lines(why)}"
    return "\n".join((lines(*head), *layer_table, "", source))


def precisions_text(layers: Iterable[tuple[str, str, str]]) -> str:
    """Returns a table of the layers' precisions, with the reasons."""
    return table(("MoE layer", "precision", "because"), list(layers))


def backbone_departures(manifest: Manifest) -> list[str]:
    """Returns the backbone's nodes whose precision is not the requested one, with reasons."""
    numbers = manifest.numbers
    fp32_nodes = numbers.get("fp32_nodes", ())
    linears = numbers.get("linears", {})
    return [
        *(f"{node['node']} ({node['op_type']}): {node['reason']}" for node in fp32_nodes),
        *(f"{node}: not in INT8: {reason}" for node, reason in linears.items() if reason),
    ]


def tuning_text(tuning: Tuning | None) -> tuple[str, ...]:
    """Returns the measurements of `--lowering tune` and their conditions, if there are any."""
    if tuning is None:
        return ()
    rows = []
    for group in tuning.measured:
        layers = first_and_count(group.layers)
        share = f"{group.k}/{group.experts}"
        for candidate in group.candidates:
            ms = candidate.latency_ms
            figures = (f"{ms.median:.3g}", f"{ms.spread:.0%}", str(ms.n))
            rows.append((layers, share, candidate.lowering, *figures))
        rows += [(layers, share, name, why, "", "") for name, why in group.left_out.items()]
    batches = sorted({group.batch for group in tuning.measured})
    return (
        lines(
            f"Measured at batch {', '.join(map(str, batches))} on {tuning.machine}, "
            f"{tuning.runtime} ({tuning.provider}), {tuning.threads} threads, "
            f"{tuning.inputs}:"
        ),
        table(("MoE layer", "k/n", "lowering", "ms (median)", "spread", "calls"), rows),
        "",
    )
