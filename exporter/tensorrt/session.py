"""Runs an engine: numpy or torch in, the same out.

One runner serves both TensorRTs. Its buffers are allocated once, for the largest shapes of the
profiles; it has a stream of its own; and work that comes back with the same shapes is recorded as a
CUDA graph and sent as one, by the runner or by TensorRT-RTX itself. k and the batch size may change
with every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import EngineError, FeedError
from . import cuda
from .context import Context
from .plan_file import find_plan
from .profiles import check_given, choose

Key = tuple[tuple[int, ...], int | None]


class EngineSession:
    """An engine on the GPU, with the calls of `exporter.session.Session`.

    `capture` records repeated work as CUDA graphs. `eager` compiles for each shape before its first
    answer (TensorRT-RTX), which takes seconds and makes all answers equally fast. Raises what
    `find_plan` and `load_engine` raise. One thread at a time may call it.
    """

    def __init__(
        self, path: Path, *, trust: bool = False, capture: bool = True, eager: bool = False
    ) -> None:
        plan = find_plan(path, trust=trust)
        self.path = path
        self.flavour = plan.flavour.name
        self.record = plan.record
        self._context = Context(plan, graphs=capture, eager=eager)
        self._capture = capture and not self._context.records_itself
        self._buffers: dict[str, cuda.DeviceBuffer] = {}
        self._captured: cuda.Captured | None = None
        self._ready: Key | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._fresh = True
        self.profiles = self._context.profiles
        self.takes_k = self._context.takes_k
        self.input_name = self._context.input_name
        self.output_names = self._context.output_names
        self._device = int(cuda.call("cudaGetDevice"))
        self._stream = cuda.Stream()
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def provider(self) -> str:
        """Who runs the graph: the flavour."""
        return self.flavour

    @property
    def recorded(self) -> bool | None:
        """Whether the last work was a recording; None where the runtime records by itself."""
        return None if self._context.records_itself else self._captured is not None

    def __call__(self, x: Any, k: int | None = None) -> Any:
        """Returns the engine's first output for a batch x, as `run` does."""
        return self.run(x, k, self.output_names[:1])[self.output_names[0]]

    def run(
        self, x: Any, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Returns outputs by name, all of them unless `outputs` says which.

        A numpy array gives numpy arrays. A torch tensor, or anything else that speaks DLPack, gives
        torch tensors where it lies: what is on the GPU stays there. Raises `FeedError` for inputs
        and `UsageError` for a k outside the profiles.
        """
        wanted = list(outputs) if outputs is not None else self.output_names
        tensor = self._tensor(x)
        self._prepare((tuple(tensor.shape), k))
        self._send(tensor)
        self._execute()
        results = {name: self._receive(name, tensor.device) for name in wanted}
        self._stream.synchronize()
        if not isinstance(x, np.ndarray):
            return results
        return {name: _as_numpy(y) for name, y in results.items()}

    def gpu_ms(self, x: Any, k: int | None = None) -> float:
        """Returns the GPU's time for one run, copies to and from it left out."""
        tensor = self._tensor(x)
        self._prepare((tuple(tensor.shape), k))
        self._send(tensor)
        self._record()
        watch = cuda.Stopwatch()
        try:
            watch.begin(self._stream)
            self._execute()
            return watch.end(self._stream)
        finally:
            watch.close()

    def close(self) -> None:
        """Gives the GPU's memory back."""
        self._forget()
        self._context.close()
        for buffer in self._buffers.values():
            buffer.free()
        self._stream.close()

    def _tensor(self, x: Any) -> torch.Tensor:
        """The input as a tensor in the engine's type, where only its width differs."""
        wanted = getattr(torch, self._context.dtype(self.input_name))
        tensor = _wrapped(x)
        if tensor is None or _kind(tensor.dtype) != _kind(wanted):
            given = getattr(x, "dtype", type(x).__name__) if tensor is None else _name(tensor.dtype)
            raise FeedError(
                f"input '{self.input_name}' takes {_name(wanted)}, not {given}",
                hint="cast the array; `moexport inspect` shows what a model takes",
            )
        if tensor.is_cuda and tensor.device.index != self._device:
            raise FeedError(
                f"input '{self.input_name}' lies on {tensor.device}, and the engine on "
                f"cuda:{self._device}",
                hint=f"move it: x.to('cuda:{self._device}')",
            )
        return tensor.detach().to(wanted).contiguous()

    def _prepare(self, key: Key) -> None:
        """Sets what a run of these shapes needs, unless it is set already."""
        shape, k = key
        check_given(k, takes_k=self.takes_k, what="engine")
        if key == self._ready:
            return
        index = choose(self.profiles, shape, k)
        self._forget()
        self._shapes = self._context.use(index, shape, k, self._stream.handle)
        self._stream.synchronize()  # a profile may be set by copies that this stream makes
        self._ready = key

    def _send(self, tensor: torch.Tensor) -> None:
        """Copies the input into its buffer, when it is complete there where it lies."""
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        address = self._buffers[self.input_name].address
        self._stream.copy(address, tensor.data_ptr(), tensor.nbytes)

    def _receive(self, name: str, device: torch.device) -> torch.Tensor:
        """Begins to copy an output out of its buffer."""
        dtype = getattr(torch, self._context.dtype(name))
        y = torch.empty(self._shapes[name], dtype=dtype, device=device)
        if y.is_cuda:  # its memory may still be in use by what the caller sent before
            torch.cuda.current_stream(device).synchronize()
        self._stream.copy(y.data_ptr(), self._buffers[name].address, y.nbytes)
        return y

    def _execute(self) -> None:
        """Runs what is set up: directly the first time, recorded the second, replayed from then.

        TensorRT wants one run between new shapes and their recording, and a recording is good until
        the context runs anything else.
        """
        if not self._fresh:
            self._record()
        if self._captured is not None:
            self._captured.launch(self._stream)
        else:
            self._context.enqueue(self._stream.handle)
            self._fresh = False

    def _record(self) -> None:
        """Records the work that is set up, if it has run once and can be recorded."""
        if self._fresh or self._captured is not None or not self._capture:
            return
        self._stream.synchronize()
        try:
            with cuda.capturing(self._stream) as found:
                self._context.enqueue(self._stream.handle)
            self._captured = found[0]
        except EngineError:  # not all control flow can be recorded
            self._capture = False

    def _forget(self) -> None:
        """Drops the recording and what is set up."""
        if self._captured is not None:
            self._captured.close()
        self._captured, self._ready, self._fresh = None, None, True

    def _allocate(self) -> None:
        """Makes room for the largest shapes that the profiles allow."""
        sizes: dict[str, int] = {}
        for index, each in enumerate(self.profiles):
            k = each.k.max if each.k is not None else 1 if self.takes_k else None
            shapes = self._context.use(index, each.max, k, self._stream.handle)
            self._stream.synchronize()
            for name, shape in (shapes | {self.input_name: each.max}).items():
                width = getattr(torch, self._context.dtype(name)).itemsize
                sizes[name] = max(sizes.get(name, 1), int(np.prod(shape, dtype=np.int64)) * width)
        for name, nbytes in sizes.items():
            self._buffers[name] = cuda.DeviceBuffer()
            self._context.bind(name, self._buffers[name].reserve(nbytes))


def _wrapped(x: Any) -> torch.Tensor | None:
    """The tensor over the same memory, None for what cannot be one."""
    if isinstance(x, torch.Tensor):
        return x
    try:
        if isinstance(x, np.ndarray):  # torch warns of memory that it may not write to
            return torch.from_numpy(np.require(x, requirements=["C", "W"]))
        return torch.utils.dlpack.from_dlpack(x) if hasattr(x, "__dlpack__") else None
    except (TypeError, ValueError, RuntimeError, BufferError):
        return None


def _kind(dtype: torch.dtype) -> str:
    """What may be cast to what: real numbers, and whole ones."""
    return "complex" if dtype.is_complex else "real" if dtype.is_floating_point else "whole"


def _as_numpy(y: torch.Tensor) -> np.ndarray:
    """The tensor as an array; numpy has no BF16, which goes to FP32 without loss."""
    array: np.ndarray = (y.float() if y.dtype == torch.bfloat16 else y).numpy()
    return array


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
