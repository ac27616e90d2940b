"""Calibration tables on disk: when one may be used, and when it belongs to something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...calibration.feeds import Feed
from ...calibration.methods import DEFAULT_METHOD
from ...calibration.table import CalibrationTable, Method, Origin, is_table
from ...common.progress import Progress, Silent
from ...common.writing import check_file, make_folder
from ...errors import CalibrationError
from ..edited import edited
from ..fingerprint import fingerprint
from ..model import Model
from ..options import ExportOptions
from ..precision import no_ranges
from .calibrate import CalibrationOptions, calibrate, feed_fingerprint, kept_experts

PEAK_SAMPLES = 64
"""Inputs whose largest values tell whether FP16 overflows, with `half.HEADROOM` to spare."""

_AGAIN = "calibrate again: `moexport calibrate MODEL --data FEED -o {path}`"


def calibrate_to(
    path: Path,
    model: Model,
    data: Feed,
    options: CalibrationOptions,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> tuple[CalibrationTable, bool]:
    """Returns the table at `path`, made now unless it is there already, and whether it was made.

    A table that is there is used where it has the same origin: model, feed, k and method. Raises
    `CalibrationError` that says what differs otherwise, unless `force` replaces it; what is no
    table is never replaced.
    """
    progress = progress or Silent()
    check_file(path)
    if path.exists() and not is_table(path):
        raise CalibrationError(
            f"{path}: the file exists and is not a calibration table; it is left untouched",
            hint="choose another -o",
        )
    if path.exists() and not force:
        table = CalibrationTable.read(path)
        progress.step("comparing with the table that is there")
        wanted = _origin(model, data, options)
        reason = _difference(table.origin, wanted)
        if reason is not None:
            raise CalibrationError(
                f"{path}: a calibration table exists there, of {reason}",
                hint="--force replaces it, -o writes elsewhere",
            )
        return table, False
    make_folder(path.absolute().parent)
    table = calibrate(model, data, options, workspace=path.absolute().parent, progress=progress)
    table.write(path)
    return table, True


def table_for_export(
    model: Model,
    options: ExportOptions,
    *,
    calibration: CalibrationOptions | None = None,
    data: Feed | None = None,
    path: Path | None = None,
    workspace: Path | None = None,
    progress: Progress | None = None,
) -> CalibrationTable:
    """Returns the ranges for an export: those of a table, or new ones from a feed.

    The k, the renormalisation and the edits are the export's; `calibration` says the rest. Raises
    `CalibrationError` for a table of another model or of fewer experts, `UsageError` where there
    is neither a table nor a feed.
    """
    model = edited(model, options.edits) if not model.edits else model
    if path is not None:
        table = CalibrationTable.read(path)
        check_table(table, model, options, where=str(path))
        return table
    if data is None:
        raise no_ranges()
    k = "n" if options.k == "input" else options.k  # any may be kept, so all are observed
    chosen = replace(calibration or CalibrationOptions(), k=k, renormalize=options.renormalize)
    return calibrate(model, data, chosen, workspace=workspace, progress=progress)


def ranges_for_export(
    model: Model,
    options: ExportOptions,
    *,
    method: Method = DEFAULT_METHOD,
    data: Feed | None = None,
    path: Path | None = None,
    progress: Progress | None = None,
) -> CalibrationTable | None:
    """Returns the ranges that an export makes use of, None where it needs none.

    INT8 must have them. FP16 takes them from a table or a feed that is there, to find what would
    overflow; a few inputs tell that.
    """
    precision = options.numbers.precision
    needed = precision == "int8" or (precision == "fp16" and data is not None)
    if path is None and not needed:
        return None
    options.numbers.check(options.target)
    samples = None if precision == "int8" else PEAK_SAMPLES
    chosen = CalibrationOptions(method=method, samples=samples)
    return table_for_export(
        model, options, calibration=chosen, data=data, path=path, progress=progress
    )


def check_table(
    table: CalibrationTable, model: Model, options: ExportOptions, *, where: str
) -> None:
    """Raises `CalibrationError` with the reason where a table does not belong to an export.

    A table of more experts than are kept serves: its ranges hold theirs. One of fewer does not,
    since rows that other experts get were never observed.
    """
    again = _AGAIN.format(path=where)
    if table.origin.model != fingerprint(model):
        raise CalibrationError(
            f"{where}: was made from another model, or from this one with other weights, "
            "configuration or edits",
            hint=again,
        )
    if table.origin.renormalize != options.renormalize:
        raise CalibrationError(
            f"{where}: was made {_renormalised(table.origin)}, the export is not so", hint=again
        )
    for layer, kept in kept_experts(model, options.k).items():
        observed = table.origin.k.get(layer, 0)
        if observed < kept:
            raise CalibrationError(
                f"{where}: layer {layer} was observed with k = {observed} and the export keeps "
                f"{kept}: what the other experts get was never seen",
                hint=f"{again} --k {kept}",
            )


def _origin(model: Model, data: Feed, options: CalibrationOptions) -> Origin:
    """The origin of the table that a calibration would make, without running the model."""
    feed, samples = feed_fingerprint(model, data, options.samples)
    return Origin(
        model=fingerprint(model),
        feed=feed,
        samples=samples,
        k=kept_experts(model, options.k),
        method=options.method,
        percentile=options.percentile if options.method == "percentile" else None,
        renormalize=options.renormalize,
    )


def _difference(found: Origin, wanted: Origin) -> str | None:
    """What distinguishes a table from the one that is wanted, in words, or None."""
    if found.model != wanted.model:
        return "another model, or of this one with other weights, configuration or edits"
    if (found.feed, found.samples) != (wanted.feed, wanted.samples):
        return f"another feed ({found.samples} inputs)"
    if dict(found.k) != dict(wanted.k):
        return f"k = {_text(found.k)}, not {_text(wanted.k)}"
    if (found.method, found.percentile) != (wanted.method, wanted.percentile):
        return f"the method {_method(found)}, not {_method(wanted)}"
    if found.renormalize != wanted.renormalize:
        return f"a model {_renormalised(found)}"
    return None


def _text(k: Mapping[str, int]) -> str:
    values = list(k.values())
    return str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))


def _method(origin: Origin) -> str:
    return origin.method if origin.percentile is None else f"{origin.method} {origin.percentile:g}"


def _renormalised(origin: Origin) -> str:
    return "with --renormalize" if origin.renormalize else "without --renormalize"
