"""A bundle on disk: opening it, and what it opens to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.files import known_sha256
from ...common.registry import left_out
from ...errors import BundleError, EngineError, UsageError
from ...graphs.targets import TARGETS, for_cpus, runtime_of
from ..session import PROVIDERS, Session, SessionOptions
from .manifest import Check, GraphRecord, Manifest, external_files, local_bundle
from .runtimes import RUNTIMES, check_options, opened

if TYPE_CHECKING:
    from ...graphs.targets import Runtime
    from ..requests import Provider
    from ..tensorrt.records import EngineRecord
    from ..tensorrt.session import EngineSession


@dataclass(frozen=True)
class Bundle:
    """An exported model: a folder with a manifest, ONNX graphs and their weights.

    What is opened is compared with the manifest's hashes first, once per file and change: the first
    time a file is read whole, at 1 to 2 GB a second. `check` False leaves that out.
    """

    path: Path
    manifest: Manifest
    check: bool = True

    @staticmethod
    def open(path: Path | str, *, check: bool = True) -> Bundle:
        """Opens a bundle, whose folder may be a URL's; `BundleError` when it is none."""
        directory = local_bundle(path)
        manifest = Manifest.read(directory)
        manifest.check_target(directory)
        return Bundle(directory, manifest, check)

    def graph(self, name: str | None = None) -> GraphRecord:
        """Returns the graph of a file or lowering, the main one by default.

        Raises `UsageError` that lists what there is.
        """
        for record in self.manifest.graphs:
            if name in (None, record.file, *record.lowerings.values()):
                return record
        known = ", ".join(record.file for record in self.manifest.graphs)
        raise UsageError(f"{self.path}: holds no graph '{name}'", hint=f"it holds {known}")

    def session(
        self,
        graph: str | None = None,
        options: SessionOptions | None = None,
        *,
        runtime: Runtime | None = None,
        provider: Provider | None = None,
        device: str | None = None,
        threads: int | None = None,
        streams: int | None = None,
        cache: Path | str | None = None,
        spin_ms: float | None = None,
        prepack: bool | None = None,
        profile: Path | str | None = None,
        **of_plugins: Any,
    ) -> Session:
        """Returns a graph of the bundle, ready to run in ONNX Runtime or OpenVINO.

        Without a name, where the bundle holds graphs for several sizes of the batch, each call
        takes the one for its own (`SessionByBatch`); to observe inner values or to profile, it is
        the main graph.

        Args:
            graph: A graph's file or lowering. Default: the one for the batch.
            options: Options for all that the keywords leave out.
            runtime: `onnxruntime`, `openvino` or that of a plugin. Default: that of the bundle's
                target.
            provider: ONNX Runtime's execution provider, `cpu`, `cuda` or `tensorrt`. Default: cpu.
            device: OpenVINO's device, `cpu`, `gpu` or `npu`. Default: cpu.
            threads: The number of threads. Default: the runtime's choice.
            streams: How many calls, from as many threads, OpenVINO runs side by side. Default: 1.
            cache: A folder in which OpenVINO keeps what it compiled, for the next start. Default:
                none.
            spin_ms: How long threads spin after a call, waiting for the next one. Default: the
                runtime's choice, some 35 ms; with 0 they rest, and leave the cores to others.
            prepack: Keep a re-ordered copy of each weight: faster, in as much memory again.
                Default: True.
            profile: Time every node, into a file whose name begins so. Default: no file.
            of_plugins: Options of the runtime's plugin, as the help of `run` lists them.

        Raises:
            UsageError: an argument is invalid.
            BundleError: the graph or its weights are not as they were written.
            EngineError: the provider cannot run here.
            MissingExtraError: the runtime is not installed.
        """
        if options is None and provider is None:
            runtime = runtime or runtime_of(self.manifest.target)
        # A CPU is not what the 16-bit graphs of the others are for: some sum them in 16 bits.
        rounded = options is None and not for_cpus(self.manifest.target)
        keywords: dict[str, Any] = {
            "runtime": runtime,
            "provider": provider and PROVIDERS.get(provider, provider),
            "device": device,
            "threads": threads,
            "streams": streams,
            "cache": cache and Path(cache),
            "spin_ms": spin_ms,
            "prepack": prepack,
            "profile": profile and Path(profile),
            "rounded": rounded or None,
            "of_plugins": of_plugins or None,
        }
        stated = {name: value for name, value in keywords.items() if value is not None}
        return self._opened(graph, replace(options or SessionOptions(), **stated))

    def _opened(self, graph: str | None, options: SessionOptions) -> Session:
        """A graph, or without a name all of those for several sizes of the batch."""
        record = self.manifest
        check_options(options)
        RUNTIMES[options.runtime].check_graphs(record, self.path)
        of_one_graph = options.observe is not None or options.profile is not None
        if graph is not None or of_one_graph or not self.graph().batches:
            return opened(self.graph_file(graph), options)
        from .batches import SessionByBatch  # few bundles have several graphs

        self.graph_file()  # what is damaged is said here, as it is of a bundle with one graph
        return SessionByBatch(
            self.path,
            options,
            graph_for=lambda size: record.graph_for(size).file,
            opened=lambda file: opened(self.graph_file(file), options),
            input_name=record.inputs[0].name,
            output_names=[port.name for port in record.outputs],
            takes_k=record.k == "input",
        )

    def graph_file(self, graph: str | None = None) -> Path:
        """Returns the file of a graph that can be opened.

        Raises `BundleError` where the graph or its weights are not as they were written.
        """
        import onnx  # loaded where a graph is: an engine runs without it
        from google.protobuf.message import DecodeError

        file = self.path / self.graph(graph).file
        self.check_whole([file.name])
        if self.check:
            try:
                self.check_whole(sorted(external_files(onnx.load(file, load_external_data=False))))
            except DecodeError as error:
                raise BundleError(f"{file}: not an ONNX graph ({error})") from error
        return file

    def engine(
        self,
        backend: str,
        graph: str | None = None,
        *,
        trust: bool = False,
        eager: bool = False,
        host_weights: bool = False,
        experts: Path | None = None,
    ) -> EngineSession:
        """Returns an engine of the bundle, ready to run on the GPU; the rest as `EngineSession`.

        Raises what `engine_record` and loading it raise.
        """
        from ..tensorrt.session import EngineSession  # loaded where it runs

        record = self.engine_record(backend, graph)
        return EngineSession(
            self.path / record.file,
            trust=trust,
            eager=eager,
            host_weights=host_weights,
            experts=experts,
        )

    def engine_record(self, backend: str, graph: str | None = None) -> EngineRecord:
        """Returns what the manifest says of an engine; nothing is loaded.

        Raises `EngineError` where the bundle has none of that backend for the graph, `UsageError`
        for a name of no backend, as of a runtime whose plugin is missing.
        """
        from ..tensorrt.records import engines_of  # loaded where an engine is asked for

        wanted = self.graph(graph).file
        for record in engines_of(self.manifest):
            if record.flavour == backend and record.graph == wanted:
                return record
        if backend not in {target.backend for target in TARGETS.own}:
            raise UsageError(
                f"{backend}: nothing that is installed runs graphs under that name",
                hint=f"choose one of: {', '.join(RUNTIMES.names)}{left_out()}",
            )
        raise EngineError(
            f"{self.path}: holds no {backend} engine of {wanted}",
            hint=f"`moexport build {self.path} --target {backend}` makes one",
        )

    def verify(
        self, *, atol: float | None = None, rtol: float | None = None, trust_engine: bool = False
    ) -> Iterator[Check]:
        """Yields the checks: every file's hash, every graph's validity, every graph's parity.

        Without `atol` and `rtol` the bounds are the usual ones of the bundle's precision. Engines
        that were built elsewhere are run with `trust_engine` alone: a plan is code.
        """
        from .verify import verify  # loaded where it runs

        return verify(self.path, self.manifest, atol=atol, rtol=rtol, trust_engine=trust_engine)

    def check_whole(self, names: Iterable[str]) -> None:
        """Raises `BundleError` for a file that is missing or not as it was written."""
        for name in names:
            path, known = self.path / name, self.manifest.files.get(name)
            if not path.is_file():
                raise BundleError(f"{path}: the file is missing", hint="export the bundle again")
            if not self.check:
                continue
            if known is None:
                raise BundleError(f"{path}: the manifest does not list it")
            size = path.stat().st_size
            if size != known.bytes or known_sha256(path) != known.sha256:
                raise BundleError(
                    f"{path}: the content has changed since the bundle was written"
                    + (f": {size} bytes, not {known.bytes}" if size != known.bytes else ""),
                    hint="copy the bundle again from an intact copy; `moexport verify` checks "
                    "all of it, and `run --no-check` runs it as it is",
                )
