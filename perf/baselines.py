"""What a user could do without moexport: compile the model, or let PyTorch export it as it is."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import nn


def compiled(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Returns a call of the module compiled for exactly this input."""
    call = torch.compile(module, dynamic=False)
    return lambda: call(x)


def plain_onnx(
    module: nn.Module, x: torch.Tensor, folder: Path, threads: int
) -> Callable[[torch.Tensor], object]:
    """Returns the module as `torch.onnx.export` writes it, in ONNX Runtime on a CPU."""
    path = folder / "plain.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (x[:1].expand(2, *x.shape[1:]),),
            dynamo=True,
            input_names=["input"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def call(tokens: torch.Tensor) -> list[np.ndarray]:
        outputs: list[np.ndarray] = session.run(None, {"input": tokens.numpy()})
        return outputs

    return call
