"""Records the probabilities of a router while it computes them.

A router is part of the network around the layer and passes only the chosen experts to the layer, so
its calls of PyTorch are recorded. The probabilities are the first of these that is found: a softmax
over all experts; a sigmoid divided by its sum; the softmax of a linear layer's outputs, one for
each expert; the softmax of the values that `topk` ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_KINDS: Mapping[str, tuple[Any, ...]] = {
    "softmax": (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax),
    "sigmoid": (torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.sigmoid),
    "linear": (
        torch.nn.functional.linear,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
    ),
    "ranked": (torch.topk, torch.Tensor.topk),
}


class RouterProbabilities(TorchFunctionMode):
    """Records values that may be a router's probabilities, until its layer takes them.

    `experts` are the numbers of experts in the layers; values of other widths are ignored.
    """

    def __init__(self, experts: frozenset[int]) -> None:
        super().__init__()
        self._experts = experts
        self._recorded: dict[str, list[Tensor]] = {kind: [] for kind in _KINDS}

    def __torch_function__(
        self, function: Any, _: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        named = keywords or {}
        result = function(*arguments, **named)
        kind = next((kind for kind, functions in _KINDS.items() if function in functions), None)
        if kind is not None:
            tensor = result
            if kind == "ranked":
                tensor = arguments[0] if arguments else named["input"]
            if tensor.shape[-1:] and tensor.shape[-1] in self._experts:
                self._recorded[kind].append(tensor)
        return result

    def take(self, rows: int, experts: int) -> np.ndarray | None:
        """Returns the probabilities [rows, n] of a layer's tokens, and clears the record.

        Returns None if the router does not compute probabilities in a known way.
        """
        last: dict[str, np.ndarray] = {}
        for kind, tensors in self._recorded.items():
            for tensor in tensors:
                if tensor.shape[-1] == experts and tensor.numel() == rows * experts:
                    last[kind] = tensor.detach().double().numpy().reshape(rows, experts)
            tensors.clear()
        # If a probability is exactly zero, it was masked after the choice, which used other values.
        if "softmax" in last and (last["softmax"] > 0).all():
            return last["softmax"]
        found = last.get("sigmoid")
        if found is None:
            logits = last.get("linear", last.get("ranked"))
            found = None if logits is None else np.exp(logits - logits.max(axis=-1, keepdims=True))
        return None if found is None else found / found.sum(axis=-1, keepdims=True)
