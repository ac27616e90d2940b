"""Graphs of a bundle for several sizes of the batch, called as one session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from ..inputs import Inputs
from ..session import Session, SessionOptions


class SessionByBatch(Session):
    """Several graphs of one model, each for some sizes of the batch; `path` is their folder.

    A graph is opened when the first batch for it comes, and stays open: each keeps packed weights
    of its own in memory. `graph_for` tells the graph for a size, and `opened` opens it.
    """

    def __init__(  # it opens no graph before a batch comes
        self,
        path: Path,
        options: SessionOptions,
        *,
        graph_for: Callable[[int], str],
        opened: Callable[[str], Session],
        input_name: str,
        output_names: Sequence[str],
        takes_k: bool,
    ) -> None:
        self.path, self.options = path, options
        self.input_name, self.output_names = input_name, list(output_names)
        self.takes_k = takes_k
        self._graph_for, self._opened = graph_for, opened
        self._sessions: dict[str, Session] = {}
        self._opening = Lock()

    def for_batch(self, size: int) -> Session:
        """Returns the graph for batches of a size, open."""
        name = self._graph_for(size)
        with self._opening:
            if name not in self._sessions:
                self._sessions[name] = self._opened(name)
            return self._sessions[name]

    @property
    def provider(self) -> str:
        """The execution provider that serves the graphs."""
        return self._any().provider

    @property
    def computed_in(self) -> str | None:
        """As `Session.computed_in`."""
        return self._any().computed_in

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns outputs by name, as `Session.run` does."""
        return self._for(x).run(x, k, outputs)

    def bound(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[np.ndarray]]:
        """Returns the runtime's own call for a batch x, as `Session.bound` does."""
        return self._for(x).bound(x, k, outputs)

    def _any(self) -> Session:
        return next(iter(self._sessions.values()), None) or self.for_batch(1)

    def _for(self, x: Inputs) -> Session:
        # Without the input itself any graph says what is missing.
        main = x.get(self.input_name, ()) if isinstance(x, Mapping) else x
        return self.for_batch(next(iter(np.shape(main)), 1))
