"""A row of the matrix: one export as it is typed, one command after it, and what came of both.

A row is right where the exported graph gives what the formulas give, and where the command did what
it says; it is refused where an error of ours says which option or layer is the reason, and nothing
was written. Anything else is raw: a finding.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnxruntime
import torch
from moexport.bench.calls import bench as bench_as
from moexport.bench.request import BenchRequest
from moexport.common.files import sha256
from moexport.common.interrupts import INTERRUPTED
from moexport.errors import MoexportError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.parity import TOLERANCES
from moexport.exporter.model import Model, fingerprint
from moexport.graphs.lowerings import all_names
from moexport.graphs.names import K_INPUT
from moexport.graphs.targets import TARGETS, Precision
from moexport.plugins.tune.recipe import LayerRecipe, Recipe
from moexport.tests.command import Outcome, run
from moexport.tests.hard.pairs import networks
from moexport.tests.hard.pairs.sources import FORETELL, NAMES, OWN, Source, Wanted, source
from moexport.tests.traces import traced_once

FACTORS: Mapping[str, tuple[str, ...]] = {
    "source": NAMES,
    "k": ("n", "share", "number", "list", "input"),
    "precision": get_args(Precision),
    "lowering": ("auto", *all_names()),
    "target": TARGETS.names,
    "batch": ("default", "fixed", "range"),
    "tokens": ("default", "fixed", "range"),
    "edits": ("none", "ablate", "rewrite", "steer", "recipe"),
    "data": ("none", "npz"),
    "quantize": ("experts", "all"),
    "expose-routing": ("no", "yes", "scores"),
    "command": (
        *("verify", "run", "bench", "inspect", "triton", "build", "replay", "report"),
        *("calibrate", "tune"),
    ),
}
"""What is paired, and the values of each."""

Row = Mapping[str, str]

Verdict = Literal["right", "refused", "raw"]

RAW = re.compile(r"\w*(?<!moexport\.)\b[A-Z]\w*(Error|Exception)\b|Traceback|ONNXRuntime|defect of")
"""What no message of ours holds: names of exceptions, and a runtime's own words."""

NAMED = re.compile(r"--[a-z]|\blayer\b|MoE|BUNDLE|bundle|model|graph|calibrat|installed|Provider")
"""What an error names."""

KEPT = {"n": "n", "share": "0.5", "number": "3", "input": "input"}


@dataclass(frozen=True)
class Result:
    """What came of a row; `said` is the error, or what is wrong.

    Where it was `exported`, what was refused is the command after that alone. `seconds` are the
    processor's.
    """

    row: Row
    verdict: Verdict
    said: str = ""
    exported: bool = False
    seconds: float = 0.0


class WrongError(Exception):
    """Something that neither is right nor was refused."""


class RefusedError(Exception):
    """An error of ours, checked."""


@dataclass
class Attempt:
    """One row at work in a folder of its own."""

    row: Row
    source: Source
    folder: Path
    files: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.x, self.bundle = self.folder / "x.npz", self.folder / "out"
        np.savez(self.x, **self.source.x)  # type: ignore[arg-type]
        self.files = self._there()

    # --- what is typed ------------------------------------------------------------------------

    def kept(self) -> dict[str, int]:
        """Each layer's k, 3 where it is a graph input."""
        counts = self.source.trained
        match self.row["k"]:
            case "n":
                return counts
            case "share":
                return {name: max(1, round(0.5 * n)) for name, n in counts.items()}
            case "list":
                return {name: 2 + number % 2 for number, name in enumerate(counts)}
        return dict.fromkeys(counts, 3)

    def size(self, axis: str) -> list[str]:
        count = 3 if axis == "batch" else self.source.tokens or 4
        match self.row[axis]:
            case "fixed":
                return [f"--{axis}", str(count)]
            case "range":
                return [f"--{axis}", f"1:{count}:{2 * count}"]
        return []

    def edits(self) -> tuple[list[str], dict[str, Any]]:
        """The options of the row's edit of the first layer, and the change that they are."""
        first, layer = next(iter(self.source.model.layers.items()))
        match self.row["edits"]:
            case "ablate":
                return ["--ablate", f"{first}:1"], {"ablated": (1,)}
            case "rewrite":
                means = [[0.1 * (i % 5) for i in range(n)] for n in layer.spec.levels]
                entry = {"layer": first, "output": 2, "coefficients": means, "lambda": 2.5}
                path = self._write("rewrite.json", json.dumps([entry]))
                return ["--rewrite", str(path)], {"rewritten": (2, means, 2.5)}
            case "steer":
                return ["--steer", f"{first}:1:0.5"], {"steered": (1, 0.5)}
        return [], {}

    def command_line(self) -> tuple[list[str | Path], dict[str, Any]]:
        """The export as it is typed, and what it changes in the first layer."""
        row, source = self.row, self.source
        line: list[str | Path] = [source.path, *source.arguments, "-o", self.bundle, "--no-engine"]
        if not TARGETS[row["target"]].backend:
            line.remove("--no-engine")
        line += ["--data", self.x] if row["data"] == "npz" else []
        shown = {"yes": "--expose-routing", "scores": "--expose-routing=scores"}
        line += [shown[row["expose-routing"]]] if row["expose-routing"] in shown else []
        if row["edits"] == "recipe":
            path, change = self._recipe()
            return [*line, "--recipe", path], change
        counts = self.kept()
        k = ",".join(map(str, counts.values())) if row["k"] == "list" else KEPT[row["k"]]
        edits, change = self.edits()
        line += ["--k", k, *self.size("batch"), *self.size("tokens"), *edits]
        for option in ("precision", "lowering", "target", "quantize"):
            line += [f"--{option}", row[option]] if row[option] != FACTORS[option][0] else []
        return line, change

    def _recipe(self) -> tuple[Path, dict[str, Any]]:
        """A recipe of the row's values, which drops the last expert of a Soft MoE layer."""
        row, counts = self.row, self.kept()
        first, layer = next(iter(self.source.model.layers.items()))
        n = layer.spec.experts
        dropped = (n - 1,) if self.source.kind == "soft-moe" else ()
        layers = {}
        for name, k in counts.items():
            experts = tuple(range(n - 1)) if dropped and name == first else ()
            lowering = "dense" if row["lowering"] == "auto" else row["lowering"]
            if row["lowering"] == "auto" and self.source.kind == "mumoe":
                lowering = "factorised"
            most = len(experts) or n
            layers[name] = LayerRecipe(
                k=None if row["k"] == "input" else min(k, most),  # type: ignore[arg-type]
                precision=row["precision"],  # type: ignore[arg-type]
                lowering=lowering,
                experts=experts,
            )
        table = self.folder / "calibration.json"
        recipe = Recipe(
            model=fingerprint(self.source.model),
            data="",
            target=row["target"],
            batch=self.size("batch")[1] if row["batch"] != "default" else "1:1:32",
            tokens=self.size("tokens")[1] if row["tokens"] != "default" else "1:196:1024",
            opset=21 if row["precision"] == "int4" else 20,
            precision=row["precision"],  # type: ignore[arg-type]
            quantize=row["quantize"],  # type: ignore[arg-type]
            layers=layers,
            calibration=sha256(table) if table.exists() else "",
        )
        return self._write("recipe.yaml", recipe.text()), {"dropped": dropped} if dropped else {}

    def _write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        self.files.add(name)
        return self.folder / name

    # --- what is run --------------------------------------------------------------------------

    def moexport(self, *line: str | Path, writes: str | None = None) -> Outcome:
        """Runs a command that must succeed, or refuse and leave nothing."""
        before = self._there()
        done = run(*line)
        if done.code == INTERRUPTED:  # the run of all rows, and not this one's option
            raise KeyboardInterrupt
        if done.code == 0:
            if writes is not None:
                self.files.add(writes)
            more = self._there() - self.files
            if more:
                raise WrongError(f"{line[0]} left {sorted(more)} behind")
            return done
        told = f"{line[0]}: exit {done.code}: {done.err.strip()[-600:]}"
        if self._there() != before:
            raise WrongError(f"{told}; left {sorted(self._there() - before)} behind")
        errors = [each for each in done.err.splitlines() if each.startswith("error: ")]
        hints = [each for each in done.err.splitlines() if each.startswith("hint: ")]
        if done.code not in (1, 2, 3) or len(errors) != 1 or not hints or RAW.search(done.err):
            raise WrongError(told)
        if not NAMED.search(errors[0]):
            raise WrongError(f"names nothing: {told}")
        raise RefusedError(f"{line[0]}: {errors[0].removeprefix('error: ')} | {hints[0]}")

    def _there(self) -> set[str]:
        return {each.name for each in self.folder.iterdir()}

    def outputs(self, bundle: Path, k: int | None = None) -> np.ndarray:
        """The first output of `moexport run`."""
        y = self.folder / "y.npz"
        given = () if k is None else ("--k", str(k))
        self.moexport("run", bundle, "-i", self.x, "-o", y, "--force", *given, writes=y.name)
        with np.load(y) as arrays:
            return arrays[Bundle.open(bundle).manifest.outputs[0].name]  # type: ignore[no-any-return]

    def compare(self, found: np.ndarray, k: Mapping[str, int], change: Mapping[str, Any]) -> None:
        """Raises `WrongError` where an output is not what the formulas give."""
        wanted, margin = self.wanted(k, change)
        if found.shape != wanted.shape:
            raise WrongError(f"shape {found.shape}, expected {wanted.shape}")
        self.within(found, wanted, margin, f"k = {list(k.values())}")

    def within(self, found: np.ndarray, wanted: np.ndarray, margin: np.ndarray, what: str) -> None:
        """Raises `WrongError` for rows that are off though their experts were chosen clearly.

        Where eight bits or fewer move scores, none may be chosen so: then half of the rows must
        hold, as a parity check lets a few tokens choose others.
        """
        precision = self.row["precision"]
        bounds = TOLERANCES[precision]  # type: ignore[index]
        off = np.abs(found - wanted).reshape(len(found), -1).max(1) / np.abs(wanted).max()
        clear = margin > bounds.tie * (4 if precision in ("int8", "int4", "fp8") else 1)
        worst = off[clear].max() if clear.any() else np.median(off)
        if not worst <= bounds.rtol:
            raise WrongError(f"{what}: off by {worst:.2g} of max|y|, rows {off.round(4).tolist()}")

    def wanted(self, k: Mapping[str, int], change: Mapping[str, Any]) -> Wanted:
        n = self.source.experts
        whole = {name: min(count, n[name]) for name, count in k.items()}
        return self.source.compute(self.source.changes(whole, **change))

    def export(self) -> None:
        """Exports, and compares what the graph gives with the formulas."""
        line, change = self.command_line()
        if self.row["command"] == "calibrate":
            line = self._calibrated(line)
        self.moexport("export", *line, writes="out")
        counts = self.kept()
        if change.get("dropped"):
            first = next(iter(counts))
            counts[first] = min(counts[first], self.source.experts[first] - 1)
        if self.row["k"] != "input":
            self.compare(self.outputs(self.bundle), counts, change)
            return
        for k in (3, max(counts.values())):
            self.compare(self.outputs(self.bundle, k), dict.fromkeys(counts, k), change)

    def _calibrated(self, line: list[str | Path]) -> list[str | Path]:
        """The same with ranges from a table, where the precision has any."""
        table, source = self.folder / "table.json", self.source
        counts = self.kept()
        k = "n" if self.row["k"] == "input" else ",".join(map(str, counts.values()))
        typed: tuple[str | Path, ...] = (
            "calibrate",
            source.path,
            *source.arguments,
            "--data",
            self.x,
            "-o",
            table,
        )
        self.moexport(*typed, "--k", k, writes=table.name)
        if self.row["precision"] in ("int8", "fp8", "fp16") and self.row["edits"] != "recipe":
            return [*line, "--calibration", table]
        return line

    # --- the command after the export ---------------------------------------------------------

    def command(self) -> None:
        match self.row["command"]:
            case "verify":
                self.moexport("verify", self.bundle)
            case "run":
                self._run_in_ones()
            case "bench":
                self._bench()
            case "report":
                self._bench()
                page = self.folder / "page" / "report.html"
                self.moexport(
                    "report", self.folder / "bench/results.json", "-o", page, writes="page"
                )
                if "<html" not in page.read_text():
                    raise WrongError("report: no page")
            case "inspect":
                self._inspect()
            case "triton":
                self._triton()
            case "build":
                self.moexport("build", self.bundle, "--dry-run")
            case "replay":
                self._replay()
            case "tune":
                self._tune()

    def _given_k(self) -> int | None:
        return 3 if self.row["k"] == "input" else None

    def _run_in_ones(self) -> None:
        """Input by input the outputs are the same, but for rounding."""
        k = self._given_k()
        whole = self.outputs(self.bundle, k)
        if self.row["batch"] == "fixed":
            return
        y = self.folder / "ones.npz"
        given = () if k is None else ("--k", str(k))
        line = ("run", self.bundle, "-i", self.x, "-o", y, "--batch-size", "1", *given)
        self.moexport(*line, writes=y.name)
        with np.load(y) as arrays:
            ones = arrays[Bundle.open(self.bundle).manifest.outputs[0].name]
        margin = self.wanted(self.kept(), self.edits()[1])[1]
        if whole.shape != ones.shape:
            raise WrongError(f"run by ones: shapes {whole.shape} and {ones.shape}")
        self.within(ones, whole, margin, "run by ones")

    def _bench(self) -> None:
        folder = self.folder / "bench"
        self.files.add(folder.name)
        request = BenchRequest(
            engine="onnxruntime",
            rounds=5,
            round_s=0.002,
            memory=False,
            parts=False,
            threads=1,
            out=folder,
        )
        try:
            alone = self.source.name not in OWN  # a bundle does not say how code is called
            models: list[Model | Bundle] = [
                *([] if alone else [self.source.model]),
                Bundle.open(self.bundle),
            ]
            results = bench_as(models, request)
        except MoexportError as error:
            if not error.hint or RAW.search(error.message):
                raise WrongError(f"bench: {error.message}") from error
            raise RefusedError(f"bench: {error.message} | {error.hint}") from error
        for each in results.rows:
            if each.error is not None and each.engine == "onnxruntime":
                raise WrongError(f"bench: {each.error}")
            if each.parity is not None and not each.parity.cosine > 0.9:
                raise WrongError(f"bench: parity missed: {each.parity}")

    def _inspect(self) -> None:
        content = json.loads(self.moexport("inspect", self.bundle, "--json").out)
        counts = [each["k"] for each in content["layers"]]
        wanted: list[int | None] = [*self.kept().values()]
        if self.row["k"] == "input":
            wanted = [None] * len(wanted)
        if counts != wanted and self.row["edits"] != "recipe":
            raise WrongError(f"inspect: k {counts}, expected {wanted}")
        self.moexport("inspect", self.bundle)

    def _triton(self) -> None:
        self.moexport("triton", self.bundle, "-o", self.folder / "repo", writes="repo")
        configs = sorted((self.folder / "repo").glob("*/config.pbtxt"))
        if not configs:
            raise WrongError("triton: no model was written")
        graphs = sorted((self.folder / "repo").glob("*/1/model.onnx/model.onnx"))
        if self.row["precision"] != "fp32" or not graphs:
            return
        session = onnxruntime.InferenceSession(str(graphs[0]), providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        x = {name: array[:3] for name, array in self.source.x.items()}
        k = self._given_k()
        if k is not None:
            x[K_INPUT] = np.array([k])
        if set(names) == set(x):
            y = session.run(None, x)[0]
            whole = self.outputs(self.bundle, k)[:3]
            if np.abs(y - whole).max() > 1e-5 * np.abs(whole).max():
                raise WrongError("triton: its graph gives something else")

    def _replay(self) -> None:
        """The bundle's own layers as a recipe give the same outputs again."""
        manifest = Bundle.open(self.bundle).manifest
        recipe, again = self.bundle / "recipe.yaml", self.folder / "again"
        if not recipe.exists():
            written = Recipe(
                model=fingerprint(self.source.model),
                data="",
                target=manifest.target,
                batch=self.size("batch")[1] if self.row["batch"] != "default" else "1:1:32",
                tokens=self.size("tokens")[1] if self.row["tokens"] != "default" else "1:196:1024",
                opset=manifest.opset,
                precision=manifest.precision,  # type: ignore[arg-type]
                quantize=self.row["quantize"],  # type: ignore[arg-type]
                layers={
                    each.name: LayerRecipe(each.k, each.precision, each.lowering)  # type: ignore[arg-type]
                    for each in manifest.layers
                },
            )
            recipe = self._write("replay.yaml", written.text())
        data = ("--data", self.x) if self.row["data"] == "npz" else ()
        line = (self.source.path, *self.source.arguments, "-o", again, "--recipe", recipe, *data)
        no_engine = ("--no-engine",) if TARGETS[self.row["target"]].backend else ()
        self.moexport("export", *line, *no_engine, writes=again.name)
        first, then = (self.outputs(bundle, self._given_k()) for bundle in (self.bundle, again))
        if self.row["edits"] in ("none", "recipe") and not np.array_equal(first, then):
            raise WrongError("replay: other outputs than those of the bundle")

    def _tune(self) -> None:
        """A search of a moment over the source, whose bundle verifies and is made again."""
        labelled = self.folder / "labelled.npz"
        y, _ = self.wanted(self.source.trained, {})
        foretells = self.source.name in FORETELL  # whose metric is the perplexity
        label = y.reshape(len(y), -1).argmax(-1)
        label[0] = (label[1] + 1) % y.shape[-1]  # of one class alone accuracy says nothing
        labels = {} if foretells else {"label": label}
        # As many as a bound needs: the same again, which a search does not mind.
        arrays = {n: np.concatenate([a] * 4) for n, a in {**self.source.x, **labels}.items()}
        np.savez(labelled, **arrays)  # type: ignore[arg-type]
        self.files |= {labelled.name, "tuned-report"}
        tuned, source = self.folder / "tuned", self.source
        line: list[str | Path] = [
            "tune",
            source.path,
            *source.arguments,
            "--data",
            labelled,
            "-o",
            tuned,
        ]
        line += ["--time", "1s", "--threads", "1", "--keep", "50%"]
        precision = self.row["precision"]
        line += ["--precision", "fp32" if precision == "fp32" else f"fp32,{precision}"]
        line += ["--target", self.row["target"], *self.size("batch"), *self.size("tokens")]
        if y.ndim > 2 and not foretells:
            line += ["--metric", f"{networks.__name__}:{networks.same_largest.__name__}"]
        self.moexport(*line, writes=tuned.name)
        self.moexport("verify", tuned)
        again = self.folder / "again"
        line = [source.path, *source.arguments, "-o", again, "--recipe", tuned / "recipe.yaml"]
        self.moexport("export", *line, writes=again.name)
        if not np.array_equal(self.outputs(again), self.outputs(tuned)):
            raise WrongError("tune: its recipe gives something else")


def attempt(row: Row, given: Source, folder: Path) -> Result:
    """Runs a row in a folder that is not there yet."""
    begun = time.process_time()
    verdict: Verdict = "right"
    said, exported = "", False
    try:
        work = Attempt(row, given, folder)
        work.export()
        exported = True
        work.command()
    except RefusedError as refusal:
        verdict, said = "refused", str(refusal)
    except WrongError as finding:
        verdict, said = "raw", str(finding)
    except Exception as error:  # noqa: BLE001
        verdict, said = "raw", f"{type(error).__name__}: {error}"
    return Result(row, verdict, said, exported, time.process_time() - begun)


def of_source(name: str, wanted: Sequence[Row], tell: Callable[[Result], None]) -> None:
    """Runs the rows of one source, whose network is traced once for those that need the same."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, traced_once():
        folder = Path(place)
        given = source(name, folder / "source")
        for number, row in enumerate(wanted):
            tell(attempt(row, given, folder / str(number)))
            shutil.rmtree(folder / str(number), ignore_errors=True)
