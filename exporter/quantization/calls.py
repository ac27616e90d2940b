"""The calls `calibrate` and `sensitivity`: ranges of a model's tensors, and the effect of INT8."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ...calibration.table import CalibrationTable
from ...common.option import takes
from ...data.batches import Feed
from ...graphs.k import parse_k
from ..checkpoints.load import AnyModel, model_of
from ..checks.answers import check_own_outputs
from ..executors import executor_of
from ..job import calibration_job
from ..requests import CalibrateRequest, LoadRequest, SensitivityRequest
from .accuracy_search import LayerSensitivity, rank
from .calibrate import ensure_table, find_ranges


@takes(CalibrateRequest)
def calibrate(model: AnyModel, data: Feed, options: CalibrateRequest) -> CalibrationTable:
    """Returns the ranges of a model's tensors over inputs; save them with `.write(path)`.

    `model` is a loaded model, a function that loads it, or an argument of `load`; `data` are its
    inputs, as in `export`. With `ray`, nodes of a cluster share the inputs: every node must have
    moexport, and model and data at the same paths or URLs.

    Raises:
        UsageError: an option is invalid.
        FeedError: the inputs do not fit the model.
        CalibrationError: a tensor's values give no range, or the table at `out` has another
            origin.
        ClusterError: the cluster cannot be reached, lacks a requested resource, or loses nodes.
    """
    executor = executor_of(options)
    if executor is not None:
        return executor.calibrate(model, data, options)
    loaded = model_of(model, options.loading, data)
    check_own_outputs(loaded, data)
    job = calibration_job(loaded, data, options)
    progress = options.progress
    if options.out is None:
        workspace = None if options.workspace is None else Path(options.workspace)
        return find_ranges(job, workspace=workspace, progress=progress)
    path = Path(options.out)
    make = partial(find_ranges, job, workspace=path.absolute().parent, progress=progress)
    return ensure_table(path, job.full_origin, make, force=options.force, progress=progress)


@takes(SensitivityRequest)
def sensitivity(
    model: AnyModel, table: CalibrationTable, data: Feed, options: SensitivityRequest
) -> tuple[LayerSensitivity, ...]:
    """Returns the effect of INT8 on each MoE layer alone, on a CPU, most sensitive first.

    `table` is the result of `calibrate` for the model, and `data` are its inputs, as in `export`.
    """
    return rank(
        model_of(model, LoadRequest(progress=options.progress), data),
        parse_k(options.k),
        table,
        data,
        options.samples,
        renormalize=options.renormalize,
        progress=options.progress,
    )
