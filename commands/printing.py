"""The results of the commands as text for people; `--json` prints the same facts as data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.text import count, size, table

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..exporter.bundle.manifest import Check, Manifest
    from ..exporter.doctor import Diagnosis
    from ..exporter.export import Prepared
    from ..exporter.inspect import ModelReport
    from ..exporter.quantization.accuracy_search import LayerHarm
    from ..exporter.tensorrt.engines import EnginePlan
    from ..exporter.tensorrt.records import Made


LAYER_HEADER = (
    "MoE layer",
    "experts n",
    "slots p",
    "dim d",
    "hidden h",
    "tokens m",
    "parameters",
)


def json_text(content: Any) -> str:
    """Plain data as indented JSON."""
    return json.dumps(content, indent=2, ensure_ascii=False)


def model_text(report: ModelReport) -> str:
    """What `inspect` says of a model: its family, its layers and what each k costs."""
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
            f"family      {report.family}",
            f"config      {', '.join(f'{key}={value}' for key, value in report.config.items())}",
            f"input       {report.input}",
            f"output      {report.output}",
            f"parameters  {count(report.parameters)}, {count(report.moe_parameters)} in MoE layers",
            *(f"note        {note}" for note in report.notes),
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


def bundle_text(path: Path, manifest: Manifest) -> str:
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
    return "\n".join(
        (
            f"bundle      {path} (moexport {manifest.moexport}, {manifest.created})",
            f"source      {manifest.source.path} ({manifest.source.family})",
            f"target      {manifest.target}, {manifest.precision}, opset {manifest.opset}",
            *(f"edited      {text}" for text in _edit_texts(manifest)),
            *ports,
            *(f"note        {note}" for note in manifest.notes),
            *(f"note        {note}" for note in _backbone_departures(manifest)),
            "",
            table(("MoE layer", "experts n", "kept k", "lowering", "reason"), layers),
            "",
            _precisions((r.name, r.precision, r.precision_reason) for r in manifest.layers),
            "",
            *_tuning_text(manifest.tuning),
            table(("file", "bytes"), files),
        )
    )


def _precisions(layers: Iterable[tuple[str, str, str]]) -> str:
    """A table of the layers' precisions, with the reason of each."""
    return table(("MoE layer", "precision", "because"), list(layers))


def departures(manifest: Manifest) -> list[str]:
    """What is not in the precision asked for, and why: layers, then nodes of the backbone."""
    layers = [
        f"{layer.name}: in {layer.precision}: {layer.precision_reason}"
        for layer in manifest.layers
        if layer.precision != manifest.precision
    ]
    return [*layers, *_backbone_departures(manifest)]


def _backbone_departures(manifest: Manifest) -> list[str]:
    numbers = manifest.numbers
    fp32_nodes = numbers.get("fp32_nodes", ())
    linears = numbers.get("linears", {})
    return [
        *(f"{node['node']} ({node['op_type']}): {node['reason']}" for node in fp32_nodes),
        *(f"{node}: not in INT8: {reason}" for node, reason in linears.items() if reason),
    ]


def _edit_texts(manifest: Manifest) -> list[str]:
    from ..exporter.edits import Edits

    return Edits.from_records(manifest.edits, "manifest.json").texts()


def _tuning_text(tuning: dict[str, Any]) -> tuple[str, ...]:
    """What `--lowering tune` measured, and on what; nothing where it was not asked for."""
    if not tuning:
        return ()
    rows = []
    for group in tuning["measured"]:
        first, *more = group["layers"]
        layers = f"{first} and {len(more)} like it" if more else first
        kept = f"{group['k']}/{group['experts']}"
        for found in group["candidates"]:
            ms = found["latency_ms"]
            figures = (f"{ms['median']:.3g}", f"{ms['spread']:.0%}", str(ms["n"]))
            rows.append((layers, kept, found["lowering"], *figures))
        rows += [(layers, kept, name, why, "", "") for name, why in group["left_out"].items()]
    batches = sorted({group["batch"] for group in tuning["measured"]})
    return (
        f"Measured at batch {', '.join(map(str, batches))} on {tuning['machine']}, "
        f"{tuning['runtime']} ({tuning['provider']}), {tuning['threads']} threads, "
        f"{tuning['inputs']}:",
        table(("MoE layer", "k/n", "lowering", "ms (median)", "spread", "calls"), rows),
        "",
    )


def plan_text(prepared: Prepared, output: Path) -> str:
    """What `export --dry-run` says."""
    plan, numbers = prepared.plan, prepared.numbers.layers
    blocks = []
    if prepared.options.numbers.precision != "fp32":
        blocks.append(_precisions((n, r.precision, r.reason) for n, r in numbers.items()) + "\n")
    for graph in plan.graphs:
        rows = [
            (
                layer.name,
                "input" if layer.k is None else f"{layer.k}/{layer.work.spec.experts}",
                layer.choice.lowering.name,
                layer.choice.reason,
            )
            for layer in graph.layers
        ]
        blocks.append(
            f"{output / graph.file}\n{table(('MoE layer', 'k/n', 'lowering', 'reason'), rows)}\n"
            f"MoE layers together: about {graph.predicted_us / 1e3:.3g} ms a batch (predicted)\n"
        )
    if plan.tuning is not None:
        blocks.append("\n".join(_tuning_text(plan.tuning.as_json())))
    blocks.append(f"weights: {size(plan.weights_bytes)}; nothing was written (--dry-run)")
    return "\n".join(blocks)


def plan_json(prepared: Prepared, output: Path) -> dict[str, Any]:
    """The plan as plain data, with notes and with what `--lowering tune` measured, if any."""
    plan, numbers = prepared.plan, prepared.numbers.layers
    notes = prepared.options.numbers.notes(prepared.options.target)
    more: dict[str, Any] = {} if plan.tuning is None else {"tuning": plan.tuning.as_json()}
    more |= {"notes": notes} if notes else {}
    return {
        "output": str(output),
        "files": plan.files,
        "graphs": {
            graph.file: [
                {
                    "name": layer.name,
                    "k": layer.k,
                    "experts": layer.work.spec.experts,
                    "lowering": layer.choice.lowering.name,
                    "reason": layer.choice.reason,
                    "precision": numbers[layer.name].precision,
                    "precision_reason": numbers[layer.name].reason,
                    "predicted_us": round(layer.choice.predicted_us, 1),
                }
                for layer in graph.layers
            ]
            for graph in plan.graphs
        },
    } | more


def engine_plans_text(plans: Sequence[EnginePlan]) -> str:
    """What `build --dry-run` says."""
    lines = []
    for plan in plans:
        version = plan.backend.version()
        lines.append(f"{plan.file} from {plan.graph.file}, {plan.backend.title} {version}")
        if plan.cards:
            lines.append(f"  compute capability {', '.join(plan.cards)}")
        lines += [f"  profile {each}" for each in plan.profiles]
    lines.append("nothing was built (--dry-run)")
    return "\n".join(lines)


def engine_plan_json(plan: EnginePlan) -> dict[str, Any]:
    """An engine that is to be built as plain data."""
    return {
        "file": plan.file,
        "graph": plan.graph.file,
        "flavour": plan.backend.name,
        "version": plan.backend.version(),
        "compute_capabilities": list(plan.cards),
        "profiles": [each.as_json() for each in plan.profiles],
        "options": plan.options.as_json(),
    }


def made_text(bundle: Path, made: Made) -> str:
    """One line about an engine that `build` has put into a bundle, or found there."""
    record = made.record
    counts = ", ".join(f"{number} in {name}" for name, number in record.precision.items())
    how = {
        "bundle": "there already",
        "cache": "taken from the cache",
        None: f"built in {record.seconds:.1f} s, {size(record.peak_memory_bytes)} at the most",
    }[made.reused]
    place = bundle / record.file
    return f"{place}: {size(place.stat().st_size)}, {counts} products, {how}"


def engine_text(facts: Mapping[str, Any]) -> str:
    """What `inspect` says of an engine (`exporter.tensorrt.plan_file.engine_facts`)."""
    lines = [
        f"engine      {facts['file']} ({size(facts['bytes'])})",
        f"built by    {facts['flavour']} {facts['version'] or '(its version is not known)'}",
    ]
    if "graph" in facts:
        from ..exporter.tensorrt.profiles import Profile

        cards = ", ".join(facts["compute_capabilities"])
        lines += [
            f"from        {facts['graph']}",
            f"runs on     {facts['device'] or 'compute capability'} {cards}",
            f"took        {facts['seconds']:.1f} s, {size(facts['peak_memory_bytes'])} at the most",
            *(f"profile     {Profile.from_json(each)}" for each in facts["profiles"]),
            f"settings    {', '.join(f'{k}={v}' for k, v in facts['settings'].items())}",
            "products    " + ", ".join(f"{n} in {name}" for name, n in facts["precision"].items()),
            "",
            table(
                ("layer", "kind", "precision"),
                [(each["name"], each["kind"], each["precision"]) for each in facts["layers"]],
            ),
        ]
    source = {
        "header": "Read from the file's first bytes; more needs its manifest or an NVIDIA GPU.",
        "record": "Written down when it was built; the engine itself is read on an NVIDIA GPU.",
        "engine": "The engine was loaded; --json has what TensorRT's inspector says.",
    }[facts["read_from"]]
    not_loaded = facts.get("not_loaded")
    return "\n".join((*lines, "", source, *([f"Not loaded: {not_loaded}."] if not_loaded else [])))


def check_text(check: Check) -> str:
    """One line of `verify`."""
    return f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}"


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """What `doctor` says."""
    facts = diagnosis.environment
    rows = [("yes" if a.available else "no", a.name, a.detail) for a in diagnosis.abilities]
    return "\n".join(
        (
            table(("", "can", "because"), rows),
            "",
            f"python {facts['python']}, {facts['cpu']['model']}, {facts['cpu']['cores']} cores",
            ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        )
    )


def harms_text(harms: Sequence[LayerHarm]) -> str:
    """Returns what INT8 does to each layer alone, the most harmful first."""
    rows = [
        (h.layer, f"{h.cosine:.7f}", f"{h.max_rel:.2g}", f"{h.routing:.1%}", f"{h.jaccard:.4f}")
        for h in harms
    ]
    return table(("MoE layer", "cosine", "error of max|y|", "same experts", "Jaccard"), rows)


def table_text(calibration: CalibrationTable) -> str:
    """Returns a calibration table's ranges beside what was observed, and what it was made from."""
    origin = calibration.origin
    rows = [
        (
            key,
            f"{r.low:.4g}",
            f"{r.high:.4g}",
            f"{r.minimum:.4g}",
            f"{r.maximum:.4g}",
            count(r.count),
        )
        for key, r in calibration.ranges.items()
    ]
    how = origin.method if origin.percentile is None else f"{origin.method} {origin.percentile:g}"
    kept = ", ".join(f"{layer} {k}" for layer, k in origin.k.items())
    return (
        table(("tensor", "low", "high", "minimum", "maximum", "values"), rows)
        + f"\n\n{how} over {origin.samples:,} inputs; k: {kept}"
    )
