"""A placeholder for expert weights of a user's layer that our layer has taken over."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ...errors import UsageError

_READ = frozenset(("shape", "ndim", "size", "dim", "numel", "nelement", "stride"))
_READ |= {"dtype", "layout", "requires_grad", "is_cuda", "is_floating_point"}
"""Attributes and methods that do not depend on a weight's values."""

_NEW = frozenset(("new_zeros", "new_ones", "new_empty", "new_full"))
"""Methods that create a tensor of the same type and on the same device."""

_VIEWS = frozenset(("T", "mT", "data", "detach"))


class MovedWeight:
    """Has the shape and type of a weight, and raises an error if its values are used."""

    def __init__(self, name: str, weight: Tensor) -> None:
        self._name = name
        self._like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self._device = weight.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by code that copies or inspects objects
            raise AttributeError(name)
        if name == "device":
            return self._device
        if name in _READ:
            return getattr(self._like, name)
        if name in _NEW:
            return getattr(torch.empty(0, dtype=self._like.dtype, device=self._device), name)
        if name in _VIEWS:
            view = getattr(self._like, name)
            moved = MovedWeight(self._name, view() if callable(view) else view)
            moved._device = self._device
            return (lambda: moved) if callable(view) else moved
        return self._refuse()

    def __len__(self) -> int:
        return len(self._like)

    def __deepcopy__(self, memo: object) -> MovedWeight:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return MovedWeight, (self._name, self._like)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        del func, types
        flat = [*args, *(kwargs or {}).values()]
        flat += [item for part in flat if isinstance(part, tuple | list) for item in part]
        next(value for value in flat if isinstance(value, MovedWeight))._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(
            f"the adapter's code computes with {self._name}, which is an expert weight",
            hint="only experts(…) may compute with the experts' weights; other code may read only "
            "their shapes and types",
        )

    __getitem__ = __iter__ = __bool__ = __float__ = __neg__ = __abs__ = __pow__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse
