"""Several graphs of a bundle, each for some batch sizes, called as one session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ..inputs import Inputs
from ..session import Session, SessionOptions
from .manifest import Manifest


class SessionByBatch(Session):
    """Several graphs of one model, each for some batch sizes; `path` is their folder.

    `open_graph` opens a graph when its first batch arrives. The graph stays open, with its packed
    weights in memory.
    """

    def __init__(  # no graph is opened before a batch arrives
        self,
        path: Path,
        options: SessionOptions,
        manifest: Manifest,
        open_graph: Callable[[str], Session],
    ) -> None:
        self.path, self.options = path, options
        self.input_name = manifest.inputs[0].name
        self.output_names = [spec.name for spec in manifest.outputs]
        self.takes_k = manifest.k == "input"
        self._manifest, self._open_graph = manifest, open_graph
        self._sessions: dict[str, Session] = {}
        self._last: Session | None = None
        self._opening = Lock()

    def for_batch(self, size: int) -> Session:
        """Returns the open session for batches of `size` inputs."""
        name = self._manifest.graph_for(size).file
        with self._opening:
            if name not in self._sessions:
                self._sessions[name] = self._open_graph(name)
            return self._sessions[name]

    @property
    def provider(self) -> str:
        return self._any_session().provider

    @property
    def computed_in(self) -> str | None:
        return self._any_session().computed_in

    @property
    def recorded(self) -> bool | None:
        return None if self._last is None else self._last.recorded

    @property
    def no_cuda_graphs(self) -> str | None:
        """See `Session.no_cuda_graphs`, for the graph that ran last."""
        return (self._last or self._any_session()).no_cuda_graphs

    def gpu_ms(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> float | None:
        return self._session_for(x).gpu_ms(x, k, outputs)

    def run(
        self, x: Any, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        return self._session_for(x).run(x, k, outputs)

    def bound(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[np.ndarray]]:
        return self._session_for(x).bound(x, k, outputs)

    def _any_session(self) -> Session:
        return next(iter(self._sessions.values()), None) or self.for_batch(1)

    def _session_for(self, x: Inputs) -> Session:
        # If the input is missing, any graph can report that; the size is then 0.
        main = x.get(self.input_name, ()) if isinstance(x, Mapping) else x
        self._last = self.for_batch(next(iter(np.shape(main)), 1))
        return self._last
