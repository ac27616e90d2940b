"""Routers that tell how clear their choices are."""

from __future__ import annotations

from torch import Tensor, nn


class GroupRouter(nn.Module):
    """A router whose choices depend on other tokens, so that it alone knows how clear they are.

    `layer` is the name of the layer whose experts it chooses.
    """

    layer: str

    def margin(self, x: Tensor, k: int | None = None) -> Tensor:
        """Returns by how much the experts of the tokens x [b, m, d] were chosen, [b, m].

        Relative to a score: where no score is off by more, none of a token's choices changes.
        [b, m, n] of a router by which each expert chooses for itself.
        """
        raise NotImplementedError
