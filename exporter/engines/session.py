"""Runs an engine: numpy or torch in, the same out.

One runner serves both TensorRTs. Its buffers are allocated once, for the largest shapes of the
profiles; it has a stream of its own; and a shape that comes back is recorded as a CUDA graph and
sent as one. k and the batch size may change with every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EngineError, FeedError, UsageError
from ...graphs.names import K_INPUT
from . import cuda
from .loading import load_engine
from .planfile import find_plan
from .profiles import Profile, choose

Key = tuple[tuple[int, ...], int | None]


class EngineSession:
    """An engine on the GPU, with the calls of `exporter.session.Session`.

    `capture` records repeated work as CUDA graphs. Raises what `find_plan` and `load_engine` raise.
    """

    def __init__(self, path: Path, *, trust: bool = False, capture: bool = True) -> None:
        plan = find_plan(path, trust=trust)
        self.path = path
        self.flavour = plan.flavour.name
        self.record = plan.record
        self._trt, self._runtime, self._engine = load_engine(plan)
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise EngineError(
                f"{path}: the GPU has no memory for its activations",
                hint="build with a smaller MAX in --profile, or free some of the GPU's memory",
            )
        self._capture = capture
        self._stream = cuda.Stream()
        self._captured: cuda.Captured | None = None
        self._last: Key | None = None
        self._profile = 0
        self.profiles = plan.record.ranges if plan.record else self._read_profiles()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        outputs = [name for name in names if self._is_output(name)]
        self.takes_k = K_INPUT in names
        (self.input_name,) = (n for n in names if n not in outputs and n != K_INPUT)
        self.output_names = outputs
        self._k = np.zeros(1, self._dtype(K_INPUT)) if self.takes_k else None
        self._allocate()

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def provider(self) -> str:
        """Who runs the graph: the flavour."""
        return self.flavour

    def __call__(self, x: Any, k: int | None = None) -> Any:
        """Returns the engine's first output for a batch x, in the kind of array that x is."""
        return self.run(x, k, self.output_names[:1])[self.output_names[0]]

    def run(
        self, x: Any, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Returns outputs by name, all of them unless `outputs` says which.

        x is a numpy array, a torch tensor or anything that speaks DLPack; what is on the GPU stays
        there. Raises `FeedError` for inputs and `UsageError` for a k outside the profiles.
        """
        wanted = list(outputs) if outputs is not None else self.output_names
        found = self._run_host(x, k) if isinstance(x, np.ndarray) else self._run_tensor(x, k)
        return {name: found[name] for name in wanted}

    def gpu_ms(self, x: np.ndarray, k: int | None = None) -> float:
        """Returns the GPU's time for one run, copies to and from it left out."""
        x = self._prepared(x, k)
        self._send(x)
        watch = cuda.Stopwatch()
        try:
            watch.begin(self._stream)
            self._execute((x.shape, k))
            return watch.end(self._stream)
        finally:
            watch.close()

    def close(self) -> None:
        """Gives the GPU's memory back."""
        self._forget()
        for buffer in self._buffers.values():
            buffer.free()
        self._stream.close()

    def _run_host(self, x: np.ndarray, k: int | None) -> dict[str, np.ndarray]:
        x = self._prepared(x, k)
        self._send(x)
        self._execute((x.shape, k))
        results = {}
        for name in self.output_names:
            y = np.empty(tuple(self._context.get_tensor_shape(name)), self._dtype(name))
            self._stream.to_host(y.ctypes.data, self._buffers[name].address, y.nbytes)
            results[name] = y
        self._stream.synchronize()
        return results

    def _run_tensor(self, x: Any, k: int | None) -> dict[str, Any]:
        import torch

        tensor = x if isinstance(x, torch.Tensor) else torch.utils.dlpack.from_dlpack(x)
        if not tensor.is_cuda:
            found = self._run_host(tensor.detach().numpy(), k)
            return {name: torch.from_numpy(y) for name, y in found.items()}
        tensor = tensor.detach().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._check_input(dtype, tuple(tensor.shape))
        self._forget()
        self._set_shapes(tuple(tensor.shape), k)
        results = {}
        for name in self.output_names:
            shape = tuple(self._context.get_tensor_shape(name))
            results[name] = torch.empty(
                shape, dtype=getattr(torch, self._dtype(name).name), device=tensor.device
            )
        torch.cuda.current_stream(tensor.device).synchronize()  # x is being written there
        self._bind({self.input_name: tensor.data_ptr()})
        self._bind({name: y.data_ptr() for name, y in results.items()})
        self._enqueue()
        self._stream.synchronize()
        self._bind_buffers()
        return results

    def _prepared(self, x: np.ndarray, k: int | None) -> np.ndarray:
        """The array in the input's dtype, where only its width differs; the shapes are set."""
        dtype = self._dtype(self.input_name)
        fitted = np.asarray(x, dtype=dtype, order="C") if x.dtype.kind == dtype.kind else x
        self._check_input(fitted.dtype.name, fitted.shape)
        self._set_shapes(fitted.shape, k)
        return fitted

    def _check_input(self, dtype: str, shape: tuple[int, ...]) -> None:
        wanted = self._dtype(self.input_name).name
        if dtype != wanted:
            raise FeedError(
                f"input '{self.input_name}' takes {wanted}, not {dtype} {shape}",
                hint="cast the array; `moexport inspect` shows what a model takes",
            )

    def _set_shapes(self, shape: tuple[int, ...], k: int | None) -> None:
        """Chooses the profile for a run and tells the context its shapes."""
        if self.takes_k != (k is not None):
            raise UsageError(
                "this engine takes k as an input, and none was given"
                if self.takes_k
                else f"k = {k} was given, but the engine's k is baked in",
                hint="pass --k K" if self.takes_k else "export with --k input to choose k per run",
            )
        index = choose(self.profiles, shape, k)
        if index != self._profile:
            self._context.set_optimization_profile_async(index, self._stream.handle)
            self._stream.synchronize()
            self._profile = index
        if self._k is not None:
            self._k[0] = k
        self._context.set_input_shape(self.input_name, shape)
        missing = self._context.infer_shapes()
        if missing:
            raise EngineError(f"{self.path}: shapes of {', '.join(missing)} are not determined")

    def _send(self, x: np.ndarray) -> None:
        self._stream.to_device(self._buffers[self.input_name].address, x.ctypes.data, x.nbytes)

    def _execute(self, key: Key) -> None:
        """Runs what is set up: directly the first time, recorded the second, replayed from then.

        A recording is good until the context runs anything else.
        """
        if key != self._last:
            self._forget()
            self._last = key
            self._enqueue()
            return
        if self._captured is None and self._capture:
            self._captured = self._record()
            self._capture = self._captured is not None  # not all control flow can be recorded
        if self._captured is None:
            self._enqueue()
        else:
            self._captured.launch(self._stream)

    def _forget(self) -> None:
        """Drops the recording."""
        if self._captured is not None:
            self._captured.close()
        self._captured, self._last = None, None

    def _record(self) -> cuda.Captured | None:
        self._stream.synchronize()
        try:
            with cuda.capturing(self._stream) as found:
                self._enqueue()
        except EngineError:
            return None
        return found[0]

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._stream.handle):
            raise EngineError(
                f"{self.path}: the run failed on the GPU",
                hint="build the engine again on this machine; `moexport verify` checks the bundle",
            )

    def _allocate(self) -> None:
        """Makes room for the largest shapes that the profiles allow."""
        sizes: dict[str, int] = {}
        for index, each in enumerate(self.profiles):
            self._context.set_optimization_profile_async(index, self._stream.handle)
            self._stream.synchronize()
            if self._k is not None and each.k is not None:
                self._k[0] = each.k.max
                self._context.set_tensor_address(K_INPUT, self._k.ctypes.data)
            self._context.set_input_shape(self.input_name, each.max)
            self._context.infer_shapes()
            for name in (self.input_name, *self.output_names):
                shape = tuple(self._context.get_tensor_shape(name))
                nbytes = int(np.prod(shape, dtype=np.int64)) * self._dtype(name).itemsize
                sizes[name] = max(sizes.get(name, 1), nbytes)
        self._profile = len(self.profiles) - 1
        self._buffers = {name: cuda.DeviceBuffer() for name in sizes}
        for name, nbytes in sizes.items():
            self._buffers[name].reserve(nbytes)
        self._bind_buffers()

    def _bind_buffers(self) -> None:
        self._bind({name: buffer.address for name, buffer in self._buffers.items()})
        if self._k is not None:
            self._bind({K_INPUT: self._k.ctypes.data})

    def _bind(self, addresses: Mapping[str, int]) -> None:
        for name, address in addresses.items():
            self._context.set_tensor_address(name, address)

    def _is_output(self, name: str) -> bool:
        return bool(self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.OUTPUT)

    def _dtype(self, name: str) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self._trt.nptype(self._engine.get_tensor_dtype(name)))
        return dtype

    def _read_profiles(self) -> list[Profile]:
        """The profiles of an engine without a record, as the engine itself tells them."""
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        (name,) = (n for n in names if not self._is_output(n) and n != K_INPUT)
        found = []
        for index in range(self._engine.num_optimization_profiles):
            shapes = self._engine.get_tensor_profile_shape(name, index)
            low, opt, high = (tuple(int(size) for size in shape) for shape in shapes)
            found.append(Profile(name, low, opt, high))
        return found
