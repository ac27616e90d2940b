"""`inspect`, and what commands print of models, bundles and engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import api
from ..common.console import show
from ..common.text import count, lines, size, table
from ..errors import UsageError
from ..exporter.requests import InspectRequest
from .options import (
    AsJson,
    ModelArgument,
    TrustEngine,
    Verbosity,
    json_text,
    refuse_idle,
)

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import Manifest, Tuning
    from ..exporter.inspect import ModelReport


def inspect(
    *,
    model: ModelArgument,
    request: InspectRequest,
    trust_engine: TrustEngine = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
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
        why = f"it says how a checkpoint is read, and {model} is {what}"
        refuse_idle(request, why=why, but=("data",))
    if request.data is not None and (plan or bundle):
        raise UsageError(
            f"--data: inspect runs only checkpoints, and {model} is {what}", hint="leave --data out"
        )
    if trust_engine and not plan:
        raise UsageError("--trust-engine: no engine is loaded", hint="name an engine's .plan file")
    if plan:
        facts = api.inspect_engine(model, trust=trust_engine)
        show(json_text(facts) if as_json else engine_text(facts))
        return
    if bundle:
        manifest = api.inspect_bundle(model)
        if as_json:
            show(manifest.to_json(), end="")
        else:
            show(bundle_text(url_of(model) or model, manifest))
        return
    with verbosity.console() as console:
        contents = api.inspect(model, replace(request, progress=console))
    show(json_text(contents.as_json()) if as_json else model_text(contents))


LAYER_HEADER = (
    "MoE layer",
    "experts n",
    "slots p",
    "dim d",
    "hidden h",
    "tokens m",
    "parameters",
)


def model_text(report: ModelReport) -> str:
    """What `inspect` says of a model: its family, its layers and what each k costs."""
    config = ", ".join(f"{key}={value}" for key, value in report.config.items())
    layers = [
        (r.name, r.experts, r.slots, r.dim, r.hidden, r.tokens, count(r.parameters))
        for r in report.layers
    ]
    costs = [
        (
            c.k,
            count(c.macs),
            f"{c.macs_share:.0%}",
            size(c.expert_bytes),
            f"{c.bytes_share:.0%}",
        )
        for c in report.costs
    ]
    return "\n".join(
        (
            lines(
                f"family      {report.family}",
                *([f"config      {config}"] if config else []),
                f"input       {report.input}",
                f"output      {report.output}",
                f"parameters  {count(report.parameters)}, {count(report.moe_parameters)} in MoE "
                "layers",
                *(f"note        {note}" for note in report.notes),
            ),
            "",
            table(LAYER_HEADER, layers),
            "",
            "All MoE layers, one input:",
            table(("k", "multiply-adds", "of all", "expert weights read", "of all"), costs),
            *_support_text(report),
        )
    )


def _support_text(report: ModelReport) -> tuple[str, ...]:
    """The lines on coefficients that are not zero, where they were counted."""
    if not report.support:
        return ()
    header = ("muMoE layer", "level", "experts n", "tokens", "mean", "p99", "max")
    rows = [
        (r.layer, r.level, r.experts, r.tokens, f"{r.mean:.1f}", f"{r.p99:.0f}", r.max)
        for r in report.support
    ]
    return (
        "",
        "Coefficients that are not zero (k = max changes nothing here):",
        table(header, rows),
    )


def bundle_text(path: str | Path, manifest: Manifest) -> str:
    """What `inspect` says of a bundle."""
    layers = [
        (r.name, r.experts, "input" if r.k is None else r.k, r.lowering, r.reason)
        for r in manifest.layers
    ]
    ports = (
        f"port        {port.name} {port.dtype} ({', '.join(map(str, port.shape))})"
        for port in (*manifest.inputs, *manifest.outputs)
    )
    files = [(name, record.bytes) for name, record in manifest.files.items()]
    peak = manifest.peak_memory_bytes
    return "\n".join(
        (
            lines(
                f"bundle      {path} (moexport {manifest.moexport}, {manifest.created})",
                f"source      {manifest.source.path} ({manifest.source.family})",
                f"target      {manifest.target}, {manifest.precision}, opset {manifest.opset}",
                *([] if peak is None else [f"memory      {size(peak)} at the most for one input"]),
                *(f"edited      {text}" for text in _edit_texts(manifest)),
                *ports,
                *(f"note        {note}" for note in manifest.notes),
                *(f"note        {note}" for note in backbone_departures(manifest)),
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


def _edit_texts(manifest: Manifest) -> list[str]:
    from ..exporter.edits import Edits

    return Edits.from_records(manifest.edits, "manifest.json").texts()


def engine_text(facts: Mapping[str, Any]) -> str:
    """What `inspect` says of an engine (`exporter.tensorrt.plan_file.engine_facts`)."""
    head = [
        f"engine      {facts['file']} ({size(facts['bytes'])})",
        f"built by    {facts['flavour']} {facts['version'] or '(its version is not known)'}",
    ]
    listed = []
    if "graph" in facts:
        from ..exporter.tensorrt.profiles import Profile

        cards = ", ".join(facts["compute_capabilities"])
        head += [
            f"from        {facts['graph']}",
            f"runs on     {facts['device'] or 'compute capability'} {cards}",
            f"took        {facts['seconds']:.1f} s, {size(facts['peak_memory_bytes'])} at the most",
            *(f"profile     {Profile.from_json(profile)}" for profile in facts["profiles"]),
            f"settings    {', '.join(f'{k}={v}' for k, v in facts['settings'].items())}",
            "products    " + ", ".join(f"{n} in {name}" for name, n in facts["precision"].items()),
        ]
        layers = [(layer["name"], layer["kind"], layer["precision"]) for layer in facts["layers"]]
        listed = ["", table(("layer", "kind", "precision"), layers)]
    source = {
        "header": "Read from the file's first bytes; more needs its manifest or an NVIDIA GPU.",
        "record": "Written down when it was built; the engine itself is read on an NVIDIA GPU.",
        "engine": "The engine was loaded; --json has what TensorRT's inspector says.",
    }[facts["read_from"]]
    if "not_loaded" in facts:
        why = f"Not loaded: {facts['not_loaded']}."
        source += f"\n{lines(why)}"
    return "\n".join((lines(*head), *listed, "", source))


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


def tuning_text(tuning: Tuning | None) -> tuple[str, ...]:
    """Returns what `--lowering tune` measured, and on what; nothing where it was not asked for."""
    if tuning is None:
        return ()
    rows = []
    for group in tuning.measured:
        first, *more = group.layers
        layers = f"{first} and {len(more)} like it" if more else first
        kept = f"{group.k}/{group.experts}"
        for candidate in group.candidates:
            ms = candidate.latency_ms
            figures = (f"{ms.median:.3g}", f"{ms.spread:.0%}", str(ms.n))
            rows.append((layers, kept, candidate.lowering, *figures))
        rows += [(layers, kept, name, why, "", "") for name, why in group.left_out.items()]
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
