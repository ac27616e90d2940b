"""Margins of routers' choices: reported by the router, or observed when it ranks scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .base import moe_layers


class GroupRouter(nn.Module):
    """A router that computes its own margins, because its choices depend on other tokens.

    `layer` is the name of the layer whose experts it chooses.
    """

    layer: str

    def margin(self, x: Tensor, k: int | None = None) -> Tensor:
        """Returns the margins of the choices for tokens x [b, m, d], [b, m].

        A margin is relative to a score: errors up to that size change no choice of the token. If
        each expert chooses its tokens, the margins are [b, m, n].
        """
        raise NotImplementedError


@contextmanager
def routed_margins(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within the context, each forward pass records the margins of token-routed experts, [t].

    The router is code of the surrounding network. Its rankings are observed in its calls of
    PyTorch's `topk`, `sort` or `max`: the margin of a token is the smallest gap between the last
    chosen score and the next, relative to the largest, over all rankings since the previous layer.
    A router whose choices depend on other tokens reports the margin itself (`GroupRouter`).
    """
    margins: dict[str, Tensor] = {}
    layers = {n: m for n, m in moe_layers(module).items() if m.spec.flat}
    if not layers:
        yield margins
        return
    by_group = {m.layer: m for m in module.modules() if isinstance(m, GroupRouter)}
    with _Rankings() as rankings, ExitStack() as hooks:

        def record(_: nn.Module, args: tuple[Any, ...], name: str) -> None:
            margin = rankings.margin(args[1])
            if name not in by_group:
                margins[name] = margin

        def record_groups(
            router: nn.Module, args: tuple[Any, ...], named: dict[str, Any], _: Any, name: str
        ) -> None:
            assert isinstance(router, GroupRouter)
            margins[name] = router.margin(*args, **named).flatten(0, 1)

        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(record, name=name)))
        for name, router in by_group.items():
            hook = partial(record_groups, name=name)
            hooks.enter_context(router.register_forward_hook(hook, with_kwargs=True))
        yield margins


_SORTS = (torch.sort, torch.Tensor.sort)
_LARGEST = (torch.max, torch.Tensor.max, torch.argmax, torch.Tensor.argmax)


class _Rankings(TorchFunctionMode):
    """Records the rankings: the scores, and how many of them were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self._rankings: list[tuple[Tensor, int | None]] | None = []

    def __torch_function__(
        self, function: Any, _: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        named = keywords or {}
        if self._rankings is not None:
            ranking = _ranking(function, arguments, named)
            if ranking is not None:
                self._rankings.append(ranking)
        return function(*arguments, **named)

    def margin(self, index: Tensor) -> Tensor:
        """Returns the margins [t] of the choices [t, k], and clears the rankings.

        If masks leave fewer scores than were chosen, rounding cannot change the choice.
        """
        smallest = torch.full(index.shape[:1], torch.inf)
        # Rankings in this function are not the network's and must not be recorded.
        rankings, self._rankings = self._rankings or [], None
        for scores, chosen in rankings:
            k = index.shape[-1] if chosen is None else chosen
            rows = scores.detach().float().reshape(-1, scores.shape[-1])
            if len(rows) != len(index) or not 0 < k < rows.shape[1]:
                continue
            masked = rows <= _MASKED
            top = rows.masked_fill(masked, -torch.inf).topk(k + 1).values
            largest = rows.masked_fill(masked | rows.isinf(), 0).abs().amax(dim=-1).clamp(min=1e-30)
            gap = top[:, k - 1] - top[:, k]
            gap = gap.nan_to_num(nan=torch.inf, posinf=torch.inf)
            smallest = torch.minimum(smallest, gap / largest)
        self._rankings = []
        return smallest


_MASKED = torch.finfo(torch.float32).min / 2
"""Masks are -inf, or the lowest number of the type, possibly plus a score."""


def _ranking(
    function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Tensor, int | None] | None:
    """Returns the scores that a call ranks along their last axis, and how many it chooses."""
    scores = arguments[0] if arguments else named.get("input")
    if not isinstance(scores, Tensor):
        return None
    if function in (torch.topk, torch.Tensor.topk):
        k = arguments[1] if len(arguments) > 1 else named["k"]
        axis = arguments[2] if len(arguments) > 2 else named.get("dim", -1)
        largest = arguments[3] if len(arguments) > 3 else named.get("largest", True)
        ranked = scores if largest else -scores
        return ranked.movedim(axis, -1), int(k)
    if function in _SORTS and named.get("descending"):
        return scores.movedim(named.get("dim", -1), -1), None
    if function in _LARGEST:
        axis = arguments[1] if len(arguments) > 1 else named.get("dim")
        if isinstance(axis, int):  # the maximum of two tensors ranks nothing
            return scores.movedim(axis, -1), 1
    return None
