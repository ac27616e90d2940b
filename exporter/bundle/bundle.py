"""Opens bundles and their graphs and engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.files import known_sha256
from ...common.option import misplaced, refuse, speaks_python
from ...common.registry import left_out
from ...errors import BundleError, EngineError, UsageError
from ...graphs.targets import TARGETS, for_cpus, runtime_of
from ..session import Session, SessionOptions
from .manifest import Check, GraphRecord, Manifest, external_files, local_bundle
from .runtimes import RUNTIMES, check_options, open_graph

if TYPE_CHECKING:
    from ...data.batches import Feed
    from ...graphs.targets import Runtime
    from ..requests import Provider
    from ..tensorrt.records import EngineRecord
    from ..tensorrt.session import EngineSession


@dataclass(frozen=True)
class Bundle:
    """An exported model: a folder with a manifest, ONNX graphs and their weights.

    A file is compared with its hash in the manifest before it is opened, once after each change.
    This reads the whole file, at 1 to 2 GB per second; `check=False` skips it.
    """

    path: Path
    manifest: Manifest
    check: bool = True

    @staticmethod
    @speaks_python
    def open(path: Path | str, *, check: bool = True) -> Bundle:
        """Opens a bundle, whose folder may be a URL; raises `BundleError` for anything else."""
        directory = local_bundle(path)
        manifest = Manifest.read(directory)
        manifest.check_target(directory)
        return Bundle(directory, manifest, check)

    @staticmethod
    def folder(bundle: Bundle | Path | str) -> Path:
        """Returns the folder of a bundle or of its path; for a URL, that of a copy."""
        return bundle.path if isinstance(bundle, Bundle) else local_bundle(bundle)

    def graph(self, name: str | None = None) -> GraphRecord:
        """Returns a graph by file or lowering, the main one by default.

        Raises `UsageError` listing the graphs if there is no such graph.
        """
        for record in self.manifest.graphs:
            if name in (None, record.file, *record.lowerings.values()):
                return record
        known = ", ".join(record.file for record in self.manifest.graphs)
        raise UsageError(f"{self.path} has no graph '{name}'", hint=f"it has {known}")

    @speaks_python
    def session(
        self,
        graph: str | None = None,
        options: SessionOptions | None = None,
        *,
        runtime: Runtime | None = None,
        provider: Provider | None = None,
        threads: int | None = None,
        spin_ms: float | None = None,
        prepack: bool | None = None,
        profile: Path | str | None = None,
        cuda_graphs: bool | None = None,
        **of_plugins: Any,
    ) -> Session:
        """Returns a graph of the bundle, ready to run.

        Without a name, if the bundle has graphs for several batch sizes, each call uses the one for
        its size (`SessionByBatch`); observing inner values and profiling use the main graph.

        Args:
            graph: A graph's file or lowering. Default: the one for the batch.
            options: Options that the keywords do not set.
            runtime: `onnxruntime`, or that of a plugin (`openvino`). Default: that of the bundle's
                target.
            provider: ONNX Runtime's execution provider, `cpu`, `cuda` or `tensorrt`. Default: cpu.
            threads: The number of threads. Default: the runtime's choice.
            spin_ms: How long threads spin after a call, waiting for the next one. Default: the
                runtime's choice, about 35 ms; with 0 they sleep and leave the cores to others.
            prepack: Keep a re-ordered copy of each weight: faster, but in twice the memory.
                Default: True.
            profile: Time every node and write a file with this prefix. Default: no file.
            cuda_graphs: Replay repeated runs on `cuda` as CUDA graphs. Default: True.
            of_plugins: Options of the runtime's plugin, as its page and the help of `run` list
                them.

        Raises:
            UsageError: an argument is invalid.
            BundleError: the graph or its weights are not as they were written.
            EngineError: the provider cannot run here.
            MissingExtraError: the runtime is not installed.
        """
        refuse(misplaced(Bundle.session, {"options": options}))
        if options is None:
            # 16-bit graphs of other targets are not meant for CPUs: some sum in 16 bits.
            options = SessionOptions(rounded=not for_cpus(self.manifest.target))
            if provider is None:
                runtime = runtime or runtime_of(self.manifest.target)
        keywords: dict[str, Any] = {
            "runtime": runtime,
            "provider": provider,
            "threads": threads,
            "spin_ms": spin_ms,
            "prepack": prepack,
            "profile": profile,
            "cuda_graphs": cuda_graphs,
            "of_plugins": {n: each for n, each in of_plugins.items() if each is not None} or None,
        }
        given = {name: value for name, value in keywords.items() if value is not None}
        return self._open_session(graph, replace(options, **given))

    def _open_session(self, graph: str | None, options: SessionOptions) -> Session:
        """Returns a session of the named graph or, without a name, of all graphs by batch size."""
        check_options(options)
        RUNTIMES[options.runtime].check_graphs(self.manifest, self.path)
        of_one_graph = options.observe is not None or options.profile is not None
        if graph is not None or of_one_graph or not self.graph().batches:
            return open_graph(self.graph_file(graph), options)
        from .batches import SessionByBatch  # few bundles have several graphs

        self.graph_file()  # reports damage now, as for a bundle with one graph
        return SessionByBatch(
            self.path, options, self.manifest, lambda n: open_graph(self.graph_file(n), options)
        )

    def graph_file(self, graph: str | None = None) -> Path:
        """Returns the file of a graph after checking it.

        Raises `BundleError` if the graph or its weights have changed since they were written.
        """
        import onnx  # only needed for graphs: an engine runs without it
        from google.protobuf.message import DecodeError

        file = self.path / self.graph(graph).file
        self.check_files([file.name])
        if self.check:
            try:
                self.check_files(sorted(external_files(onnx.load(file, load_external_data=False))))
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
        """Returns an engine of the bundle, ready to run; `EngineSession` describes the arguments.

        Raises the errors of `engine_record` and of loading the engine.
        """
        from ..tensorrt.session import EngineSession  # needed for engines only

        record = self.engine_record(backend, graph)
        return EngineSession(
            self.path / record.file,
            trust=trust,
            eager=eager,
            host_weights=host_weights,
            experts=experts,
        )

    def engine_record(self, backend: str, graph: str | None = None) -> EngineRecord:
        """Returns the manifest's record of an engine; loads nothing.

        Raises `EngineError` if the bundle has no engine of that backend for the graph, `UsageError`
        for an unknown backend, such as a runtime whose plugin is missing.
        """
        from ..tensorrt.records import engines_of  # needed for engines only

        file = self.graph(graph).file
        for record in engines_of(self.manifest):
            if record.flavour == backend and record.graph == file:
                return record
        if backend not in {target.backend for target in TARGETS.own}:
            raise UsageError(
                f"{backend}: no installed package provides this runtime",
                hint=f"choose one of: {', '.join(RUNTIMES.names)}{left_out()}",
            )
        raise EngineError(
            f"{self.path} has no {backend} engine of {file}",
            hint=f"`moexport build {self.path} --target {backend}` builds one",
        )

    def verify(
        self,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        trust_engine: bool = False,
        data: Feed | None = None,
    ) -> Iterator[Check]:
        """Yields the checks: every file's hash, every graph's validity, every graph's parity.

        With `data`, it also yields the accuracy on its labels and the difference from its outputs.

        Without `atol` and `rtol` the bounds of the bundle's precision apply. Engines that were
        built elsewhere only run with `trust_engine`, because a plan is code.
        """
        from .verify import checks  # needed here only

        given = {"atol": atol, "rtol": rtol, "trust_engine": trust_engine}
        refuse(misplaced(Bundle.verify, given))
        return checks(
            self.path, self.manifest, atol=atol, rtol=rtol, trust_engine=trust_engine, data=data
        )

    def check_files(self, names: Iterable[str]) -> None:
        """Raises `BundleError` for a file that is missing or has changed since it was written."""
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
