"""Adds built engines to a bundle: their files, and entries in its manifest and on its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.documents import from_data
from ...common.files import sha256
from ...common.text import markdown
from ...common.writing import locked, sync_to_disk, temporary_folder, write_text
from ...errors import BundleError
from ...graphs.names import K_INPUT
from ..bundle.manifest import MANIFEST_FILE, FileRecord, Manifest, is_plain_name
from .backends import BACKENDS, Backend
from .options import EngineOptions
from .profiles import Profile, check_k, choose


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """An engine of a bundle.

    `precision` counts the matrix products and convolutions by type, as read back from the compiled
    network; the file `layers` lists them. `device` names the GPU that built the engine, or is None
    if it was built for named compute capabilities. `key` identifies graph, weights, options,
    version and device: engines with equal keys are equal. `peak_memory_bytes` is the build's peak
    use of the machine's memory. `kernels` maps each MoE layer to the types that the engine's layers
    for its experts read and write, if the engine was inspected on a GPU. `bound` lists the weights
    that are inputs of the engine. `signature` identifies the user and the machine that built the
    engine.
    """

    file: str
    graph: str
    flavour: str
    version: str
    compute_capabilities: list[str]
    device: str | None
    precision: dict[str, int]
    profiles: list[dict[str, Any]]
    options: dict[str, Any]
    settings: dict[str, Any]
    layers: str
    key: str
    seconds: float
    peak_memory_bytes: int
    signature: str = ""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    bound: list[dict[str, Any]] = field(default_factory=list)

    def check_fits(self, shape: Sequence[int], k: int | None) -> None:
        """Raises what a run with this shape and k would raise, without loading the engine.

        This is `FeedError` for a shape, or `UsageError` for a k, that no profile contains.
        """
        check_k(self.ranges, k)
        choose(self.ranges, shape, k)

    @property
    def ranges(self) -> list[Profile]:
        return [Profile.from_json(profile) for profile in self.profiles]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """An engine to build from a graph and, once it is built, its record in the manifest.

    `weights_bytes` is the size of the bundle's weights. `on_gpu` tells whether the build machine
    has a GPU. `notes` are remarks on the profiles for users. A built engine has a `record` and the
    new `files`; `reused` is `bundle` or `cache` if the engine was found there.
    """

    graph: str
    file: str
    backend: Backend
    profiles: tuple[Profile, ...]
    cards: tuple[str, ...] = ()
    options: EngineOptions = EngineOptions()
    weights_bytes: int = 0
    on_gpu: bool = False
    notes: tuple[str, ...] = ()
    record: EngineRecord | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    reused: str | None = None

    @property
    def built(self) -> EngineRecord:
        assert self.record is not None, "the engine has not been built"
        return self.record


def engines_of(manifest: Manifest) -> list[EngineRecord]:
    """Returns the engines in a manifest; `BundleError` if one is incomplete."""
    what = f"{MANIFEST_FILE}: not a complete manifest"
    records = [
        from_data(EngineRecord, entry, what, at=f"engines[{index}]", error=BundleError)
        for index, entry in enumerate(manifest.engines)
    ]
    for record in records:
        try:
            valid = (
                all(map(is_plain_name, (record.file, record.graph, record.layers)))
                and record.ranges
            )
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise BundleError(f"{what}: the profiles of {record.file}: {error}") from error
        if not valid:
            raise BundleError(f"{what}: {record.file!r} is not an engine in the bundle's folder")
    return records


def with_engines(manifest: Manifest, built: Sequence[EnginePlan]) -> Manifest:
    """Returns the manifest with these engines in place of those with the same files."""
    new = {engine.built.file: engine.built for engine in built}
    old = [record for record in engines_of(manifest) if record.file not in new]
    files = dict(manifest.files)
    for engine in built:
        files.update(engine.files)
    engines = [asdict(record) for record in (*old, *new.values())]
    return replace(manifest, engines=engines, files=dict(sorted(files.items())))


def without_files(manifest: Manifest, names: set[str]) -> Manifest:
    return replace(
        manifest,
        engines=[engine for engine in manifest.engines if engine.get("file") not in names],
        files={name: record for name, record in manifest.files.items() if name not in names},
    )


PAGE = "README.md"

Describe = Callable[[Path, Manifest], Manifest]
"""Rewrites the page of a bundle, and returns a manifest that lists the new page."""


def add_to_bundle(
    directory: Path, built: Sequence[EnginePlan], staged: Path, describe: Describe | None = None
) -> None:
    """Adds built engines to a bundle, its manifest and, with `describe`, its page.

    The bundle is complete at every moment: a replaced engine is first removed from the manifest,
    and the new one is listed only when its files are in place. Concurrent builds take turns, and
    all of their engines are kept.
    """
    new = [engine for engine in built if engine.files]
    if not new:
        return
    names = sorted({name for engine in new for name in engine.files})
    with _write_errors(directory), locked(directory):
        for name in names:
            sync_to_disk(staged / name)
        before = Manifest.read(directory)
        if not is_as_listed(directory, PAGE, before):
            describe = None  # a page that a user has edited stays unchanged
        removed = {*names, PAGE} if describe else {*names}
        write_text(without_files(before, removed).to_json(), directory / MANIFEST_FILE)
        for name in names:
            (staged / name).replace(directory / name)
        manifest = with_engines(Manifest.read(directory), new)
        if describe is not None:
            manifest = describe(directory, manifest)
        write_text(manifest.to_json(), directory / MANIFEST_FILE)


def is_as_listed(directory: Path, name: str, manifest: Manifest) -> bool:
    """Returns whether a file of a bundle is the one that the manifest lists."""
    record, path = manifest.files.get(name), directory / name
    return record is not None and path.is_file() and sha256(path) == record.sha256


@contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """Yields a temporary folder inside a bundle, which is removed afterwards."""
    with ExitStack() as stack:
        with _write_errors(directory):
            folder = stack.enter_context(temporary_folder(directory / "engines"))
        yield folder


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BundleError(
            f"{directory}: cannot be written: {error.strerror}",
            hint="free some space, or copy the bundle to a folder that you may write to",
        ) from error


NEVER_RUN = (
    "**Never run**: building an engine does not run it, and any comparison above was made with the "
    "graph in ONNX Runtime. On the machine with the GPU, `moexport verify . --trust-engine` "
    "compares each engine with PyTorch. An engine may execute code, so trust only engines that you "
    "built. In this folder:"
)


def engine_page(manifest: Manifest) -> Iterator[str]:
    """Yields the paragraphs on a bundle's engines: a table, and code that runs the first one."""
    records = engines_of(manifest)
    if not records:
        return
    rows = []
    for record in records:
        counts = sorted(record.precision.items())
        rows.append(
            (
                f"`{record.file}`",
                f"`{record.graph}`",
                gpus(record),
                f"{BACKENDS[record.flavour].title} {record.version}",
                "; ".join(map(str, record.ranges)),
                ", ".join(f"{count} in {name}" for name, count in counts) or "–",
            )
        )
    headers = ("engine", "graph", "GPUs", "built with", "sizes, min : opt : max", "products")
    first, spec = records[0], manifest.inputs[0]
    k = f" --k {_example_k(manifest, first)}" if manifest.k == "input" else ""
    yield "## Run the engine"
    yield markdown(headers, rows)
    yield NEVER_RUN
    yield (
        "```sh\nmoexport verify . --trust-engine\n"
        f"moexport run . -i INPUTS.npz -o OUTPUTS.npz{k} --engine {first.flavour} --trust-engine\n"
        "```"
    )
    k = f", {_example_k(manifest, first)}" if manifest.k == "input" else ""
    yield (
        "```python\nimport moexport\nimport numpy as np\n\n"
        f'with moexport.Bundle.open(".").engine("{first.flavour}", trust=True) as session:\n'
        f'    y = session(np.zeros({first.ranges[0].opt}, "{spec.dtype}"){k})\n```'
    )
    yield _without_moexport(manifest, first)


def engine_files(manifest: Manifest) -> dict[str, str]:
    files = {}
    for record in engines_of(manifest):
        files[record.file] = f"the engine of `{record.graph}` for {gpus(record)}"
        files[record.layers] = f"the compiled layers of `{record.file}`"
    return files


def gpus(record: EngineRecord) -> str:
    """Returns the GPUs on which an engine runs: `RTX 40 series (8.9)`, or that of its build."""
    cards = BACKENDS[record.flavour].cards
    level = record.options.get("hardware_compatible")
    if record.device is not None and not level:
        return f"{record.device} ({', '.join(record.compute_capabilities)}) only"
    names = [f"{cards[c]} ({c})" if c in cards else c for c in record.compute_capabilities]
    if level == "ampere-plus":
        return "compute capability 8.0 and newer"
    return ", ".join(names) if cards else f"compute capability {', '.join(names)}"


def _without_moexport(manifest: Manifest, record: EngineRecord) -> str:
    """Returns Python code that runs an engine without moexport if the plan has all weights."""
    title = BACKENDS[record.flavour].title
    weight_options = ("strip_plan", "weight_streaming")
    if record.bound or any(record.options.get(name) for name in weight_options):
        return (
            "Its weights are not in the plan, or not only in the GPU's memory; moexport provides "
            f"them to {title}."
        )
    return (
        f"With {title} {record.version} and PyTorch, without moexport (also never run):\n\n"
        f"```python\n{_program(manifest, record)}\n```"
    )


def _program(manifest: Manifest, record: EngineRecord) -> str:
    spec, module = manifest.inputs[0], BACKENDS[record.flavour].module
    dtypes = {output.name: output.dtype for output in manifest.outputs}
    names: Sequence[str] = record.settings.get("outputs") or list(dtypes)
    outputs = ", ".join(f'"{name}": torch.{dtypes.get(name, "int64")}' for name in names)
    on_host = [
        f"k = torch.tensor([{_example_k(manifest, record)}]).pin_memory()  # read on the host",
        f'context.set_tensor_address("{K_INPUT}", k.data_ptr())',
    ]
    return "\n".join(
        (
            "import torch",
            f"import {module} as trt",
            "",
            "runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))",
            *(
                ("runtime.engine_host_code_allowed = True",)
                if record.options.get("version_compatible")
                else ()
            ),
            f'with open("{record.file}", "rb") as plan:',
            "    engine = runtime.deserialize_cuda_engine(plan.read())",
            "context = engine.create_execution_context()",
            *(on_host if manifest.k == "input" else ()),
            f'x = torch.zeros({record.ranges[0].opt}, dtype=torch.{spec.dtype}, device="cuda")',
            f'context.set_input_shape("{spec.name}", tuple(x.shape))',
            f'context.set_tensor_address("{spec.name}", x.data_ptr())',
            "y = {}",
            f"for name, dtype in {{{outputs}}}.items():",
            "    y[name] = torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, "
            'device="cuda")',
            "    context.set_tensor_address(name, y[name].data_ptr())",
            "stream = torch.cuda.Stream()",
            "stream.wait_stream(torch.cuda.current_stream())",
            "context.execute_async_v3(stream.cuda_stream)",
            "stream.synchronize()",
        )
    )


def _example_k(manifest: Manifest, record: EngineRecord) -> int:
    k = record.ranges[0].k
    return min(layer.experts for layer in manifest.layers) if k is None else k.opt
