"""What a user's layer holds in place of weights that became ours: their shapes may be read."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import UsageError

_SIZES = ("shape", "ndim", "size", "dim", "numel", "nelement", "stride")
_READ = frozenset((*_SIZES, "dtype", "layout", "requires_grad", "is_cuda", "is_floating_point"))
"""What of a weight tells no value of it."""

_MADE = frozenset(("new_zeros", "new_ones", "new_empty", "new_full"))
"""What makes another tensor of the same type and device."""

_TURNED = frozenset(("T", "mT", "data", "detach"))


class MovedWeight:
    """Has the shape and the type of a weight, and says what is wrong where its values are used."""

    def __init__(self, name: str, weight: Tensor) -> None:
        self._name = name
        self._like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self._device = weight.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and inspects objects asks for
            raise AttributeError(name)
        if name == "device":
            return self._device
        if name in _READ:
            return getattr(self._like, name)
        if name in _MADE:
            return getattr(torch.empty(0, dtype=self._like.dtype, device=self._device), name)
        if name in _TURNED:
            turned = getattr(self._like, name)
            made = MovedWeight(self._name, turned() if callable(turned) else turned)
            made._device = self._device
            return (lambda: made) if callable(turned) else made
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
            f"the adapter's code computes with {self._name}, which is a weight of the experts",
            hint="experts(…) is all that computes with the experts' weights; the code around them "
            "may read their shapes and types alone",
        )

    __getitem__ = __iter__ = __bool__ = __float__ = __neg__ = __abs__ = __pow__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse


def move_out(module: nn.Module, name: str, whole: str) -> None:
    """Puts what has its shape alone in place of a parameter of a module; `whole` is its path."""
    weight = getattr(module, name)
    delattr(module, name)
    setattr(module, name, MovedWeight(whole, weight))
