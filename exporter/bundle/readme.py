"""`README.md` in a bundle, for people who have only the folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from ...common.text import markdown, markdown_text, size
from ...graphs.edits import Edits
from ...graphs.names import K_INPUT, PRESENT
from ...graphs.targets import for_cpus, runtime_of
from ..inputs import PAST_AXIS, shape_text
from ..session import CPU, CUDA, NO_KLEIDIAI
from .manifest import MANIFEST_FILE, FileRecord, LayerRecord, Manifest, TensorSpec
from .parity import Parity, describe, sized_files
from .runtimes import RUNTIMES
from .steps import Step

README_FILE = "README.md"

CONTENTS = {
    "weights.bin": "the weights, shared by all graphs; keep it in the same folder",
    "parity.npz": "reference inputs and PyTorch's outputs, which `moexport verify` uses",
    "calibration.json": "the value ranges of tensors that quantisation used",
    "substitutes.safetensors": "the arrays that replace experts that were dropped or merged",
    MANIFEST_FILE: "all of this and more, for programs, with the hash of every file",
}


def with_readme(directory: Path, manifest: Manifest, steps: Iterable[Step] = ()) -> Manifest:
    """Writes the page of a bundle, to which `steps` added files.

    Returns the manifest with the page as its last file.
    """
    path = directory / README_FILE
    path.write_text(readme(manifest, tuple(steps)), encoding="utf-8", newline="\n")
    return replace(manifest, files={**manifest.files, README_FILE: FileRecord.of(path)})


def readme(manifest: Manifest, steps: Sequence[Step] = ()) -> str:
    """Returns the page: the model, its origin, its checks, how to run it, and its files.

    `steps` describe the files that they added, and their results.
    """
    source = manifest.source
    contents = CONTENTS | {name: text for step in steps for name, text in step.contents.items()}
    computed = {layer.name: _computed_text(layer) for layer in manifest.layers}
    edits = Edits.from_records(manifest.edits, MANIFEST_FILE)
    merged = {merge.layer: "merged into one" for merge in edits.merged}
    chosen = _title_text([text for name, text in computed.items() if name not in merged])
    selects = any(layer.k is None or layer.k < layer.experts for layer in manifest.layers)
    layers = [
        (
            markdown_text(layer.name),
            layer.kind,
            merged.get(layer.name, computed[layer.name]),
            layer.lowering,
            layer.precision,
        )
        for layer in manifest.layers
    ]
    files = [
        (f"`{name}`", f"{record.bytes:,}", contents.get(name) or _content_text(manifest, name))
        for name, record in manifest.files.items()
    ]
    group = manifest.group_size
    multiples = f", the batch any multiple of {group}" if group > 1 else ""
    notes = [markdown_text(note) for note in manifest.notes]
    if manifest.engines:
        from ..tensorrt.records import engine_page  # needed for engines only
    engines = [*engine_page(manifest)] if manifest.engines else []
    config = ", ".join(f"{key} = {value}" for key, value in source.config.items())
    parts = (
        f"# {markdown_text(PurePath(source.path).name or source.family)}, {chosen}",
        f"An ONNX model (opset {manifest.opset}) for `{manifest.target}` in {manifest.precision}, "
        f"written by moexport {manifest.moexport} on {manifest.created[:10]}."
        + (
            " For every input, each MoE layer selects k experts; the others do not affect its "
            "output."
        )
        * selects,
        f"It was made from weights of the family `{source.family}` (SHA-256 `{source.sha256}`)"
        + (f" with {markdown_text(config)}." if config else "."),
        *_edits_text(edits),
        markdown(("layer", "kind", "experts", "lowering", "precision"), layers),
        *(text for step in steps for text in step.page(manifest)),
        "## Checked against PyTorch",
        _parity_text(manifest),
        *_checked_on(manifest),
        *(["\n".join(f"- {note}" for note in notes)] if notes else ()),
        *engines,
        "## Run the graph" if engines else "## Run it",
        _program(manifest),
        f"Input {_listed(manifest.inputs)}, output {_listed(manifest.outputs)}; named axes may "
        f"have any size{multiples}. `moexport run` and `moexport verify` do the "
        "same from a shell."
        + (f" {ROUTING}" if any("/" in spec.name for spec in manifest.outputs) else "")
        + (f" {CACHE}" if any(spec.default == "empty" for spec in manifest.inputs) else ""),
        "## Files",
        markdown(
            ("file", "bytes", "content"),
            [*files, (f"`{MANIFEST_FILE}`", "", CONTENTS[MANIFEST_FILE])],
        ),
    )
    return "\n\n".join(parts) + "\n"


def _computed_text(layer: LayerRecord) -> str:
    """Returns the number of computed experts: `4 of 16`, or `4 of 12 (of 16 trained)`."""
    kept = layer.kept if layer.k else K_INPUT
    if layer.trained is None:
        return f"{kept} of {layer.of_experts}"
    if layer.k == layer.experts:
        return f"{layer.experts} of {layer.trained}"
    return f"{kept} of {layer.experts} (of {layer.trained} trained)"


def _title_text(computed: Sequence[str]) -> str:
    """Returns the number of computed experts in all layers, for the title."""
    different = list(dict.fromkeys(computed))
    if len(different) < 2:
        text = "".join(different).replace(f"{K_INPUT} of", "any k of")
        text = text if text.startswith("any") else f"k = {text}"
        return f"{text} experts per input" if different else "experts merged"
    if len(different) > 3:
        different = [f"{different[0]} to {different[-1]}"]
    return f"k = {' and '.join(different)} experts, by layer"


def _edits_text(edits: Edits) -> Iterator[str]:
    """Yields a paragraph on how the model was edited."""
    if edits:
        lines = "\n".join(f"- {markdown_text(text)}" for text in edits.texts())
        yield f"The MoE layers were edited:\n\n{lines}"


ROUTING = "Outputs whose names begin with the name of a layer show which experts it chose."

CACHE = (
    "To continue a text, pass each output `present.…` to the next call as the input "
    "`past_key_values.…`, together with the new tokens only; `attention_mask` and `position_ids` "
    "cover all tokens."
)


def _content_text(manifest: Manifest, name: str) -> str:
    for graph in manifest.graphs:
        if graph.file == name:
            lowerings = ", ".join(sorted({*graph.lowerings.values()}))
            if not graph.batches:
                return f"the graph: {lowerings}"
            first, last = graph.batches
            return f"a graph: {lowerings}; for batch sizes {first} to {last}, but it accepts any"
    if sized_files([name]):
        return f"reference inputs of {next(iter(sized_files([name])))} tokens and PyTorch's outputs"
    folder = name.rpartition("/")[0]
    if folder:
        return f"for {folder.partition('/')[0]}, with the file name that it expects"
    if not manifest.engines:
        return "added by a plugin"
    from ..tensorrt.records import engine_files  # loaded if a bundle has an engine

    return engine_files(manifest).get(name, "added by a plugin")


def _least_shape(spec: TensorSpec) -> str:
    """Returns the smallest shape of an input: the fewest inputs, one token, an empty cache."""
    smallest = {PAST_AXIS: 0, "batch": spec.groups_of or 1}
    return ", ".join(
        str(size if isinstance(size, int) else smallest.get(size, 1)) for size in spec.shape
    )


def _listed(specs: Sequence[TensorSpec]) -> str:
    """Returns the first input or output and the network's others, without cache and routing."""
    others = (p for p in specs[1:] if p.default is None and p.name != K_INPUT)
    shown = (p for p in others if "/" not in p.name and not p.name.startswith(f"{PRESENT}."))
    return ", ".join(map(_spec_text, (specs[0], *shown)))


def _spec_text(spec: TensorSpec) -> str:
    return f"`{spec.name}`: {spec.dtype} {shape_text(spec.shape)}"


def _parity_text(manifest: Manifest) -> str:
    record = manifest.parity
    if record is None:
        return "**Not checked**: it was exported with `--no-verify`."
    text = describe(Parity.of(record))
    return f"{text[0].upper()}{text[1:]}."


ON_OTHER_CPUS = (
    "This bundle was not run on another CPU. CPU graphs of other networks in its precision gave "
    "the same results on emulated CPUs: ARM with and without FP16 arithmetic, x86 with AVX2 and "
    "x86 with SSE4.2 only."
)


def _checked_on(manifest: Manifest) -> Iterator[str]:
    """Yields the CPUs on which the precision was checked, and the memory for one input."""
    cpu = manifest.environment.get("cpu", {})
    names = ", ".join(cpu.get("instructions", ()))
    machine = f"{cpu.get('architecture', 'this machine')}" + (f" with {names}" if names else "")
    if manifest.parity is not None:
        elsewhere = f" {ON_OTHER_CPUS}" * (
            for_cpus(manifest.target) and manifest.precision in ("fp32", "fp16", "int8")
        )
        yield f"It was checked on {machine}.{elsewhere} `moexport verify` checks it anywhere else."
    if not for_cpus(manifest.target):
        yield "**Never run on a GPU**: it is meant for one, but exports compare on the CPU."
    if manifest.peak_memory_bytes is not None:
        yield (
            f"One input needs at most {size(manifest.peak_memory_bytes)} of memory, including "
            "Python and the runtime, as measured there."
        )


def _program(manifest: Manifest) -> str:
    """Returns the program that runs the main graph on one input of zeros."""
    k = max(1, min(manifest.experts.values()) // 4)
    feeds = [
        f'"{K_INPUT}": np.array([{k}], "int64")'
        if spec.name == K_INPUT
        else f'"{spec.name}": np.{"ones" if spec.default == "ones" else "zeros"}'
        f'(({_least_shape(spec)}), "{spec.dtype}")'
        for spec in manifest.inputs
    ]
    feed = ", ".join(feeds) if len(feeds) < 3 else "\n    " + ",\n    ".join(feeds) + ",\n"
    file, output = manifest.graphs[0].file, manifest.outputs[0].name
    program = RUNTIMES[runtime_of(manifest.target)].program
    if program is not None:
        return f"```python\n{program(file, feed, output)}\n```"
    provider = CPU if for_cpus(manifest.target) else CUDA
    options, arguments = "", "providers="
    if manifest.precision == "int4" and provider == CPU:
        # KleidiAI's kernels on ARM are less accurate (`session.NO_KLEIDIAI`).
        options, arguments = _with_entry(*NO_KLEIDIAI), "options, "
    if manifest.precision == "int8" and manifest.target.startswith("tensorrt"):
        # ONNX Runtime fuses QuantizeLinear and DequantizeLinear wrongly for experts in one tensor.
        options, arguments = _with_entry("session.disable_quant_qdq", "1"), "options, "
    session_arguments = f'{arguments}["{provider}"]'
    return (
        f"```python\nimport numpy as np, onnxruntime\n{options}"
        f'session = onnxruntime.InferenceSession("{file}", {session_arguments})\n'
        f'(y,) = session.run(["{output}"], {{{feed}}})\n```'
    )


def _with_entry(name: str, value: str) -> str:
    return (
        "options = onnxruntime.SessionOptions()\n"
        f'options.add_session_config_entry("{name}", "{value}")\n'
    )
