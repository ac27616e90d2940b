"""The MLP-Mixer whose token and channel MLPs are muMoE blocks.

Parameter names are those of the published code. Sizes: `b` batch, `m` patches, `d` width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """Sizes of the host. `grid` is the number of patches (down, across), of side `patch`."""

    grid: tuple[int, int]
    patch: int
    channels: int
    dim: int
    depth: int
    classes: int

    @property
    def tokens(self) -> int:
        """m: patches of one image."""
        return self.grid[0] * self.grid[1]

    @property
    def pixels(self) -> int:
        """Numbers in one patch."""
        return self.patch * self.patch * self.channels


class Patches(nn.Module):
    """Images (b, c, H, W) to patches (b, m, s·s·c), row by row, channels innermost."""

    def __init__(self, spec: MixerSpec) -> None:
        super().__init__()
        down, across = spec.grid
        self.windows = (-1, spec.channels, down, spec.patch, across, spec.patch)
        self.rows = (-1, spec.tokens, spec.pixels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the patches."""
        return x.reshape(self.windows).permute(0, 2, 4, 3, 5, 1).reshape(self.rows)


class Transposed(nn.Module):
    """(b, m, d) to (b, d, m) and back."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x with its last two axes swapped."""
        return x.transpose(1, 2)


class PreNormResidual(nn.Module):
    """x + fn(norm(x)); `fn` is a placeholder until the layer is put in."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        y: Tensor = self.fn(self.norm(x)) + x
        return y


class Mean(nn.Module):
    """The mean over the tokens: (b, m, d) to (b, d)."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean."""
        return x.mean(dim=1)


class MlpMixer(nn.Module):
    """Images (b, c, H, W) to logits (b, classes)."""

    def __init__(self, spec: MixerSpec) -> None:
        super().__init__()
        self.stem = nn.Sequential(Patches(spec), nn.Linear(spec.pixels, spec.dim))
        self.mixer_blocks = nn.Sequential(
            *(
                nn.Sequential(
                    PreNormResidual(
                        spec.dim, nn.Sequential(Transposed(), nn.Identity(), Transposed())
                    ),
                    PreNormResidual(spec.dim, nn.Identity()),
                )
                for _ in range(spec.depth)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(spec.dim), Mean(), nn.Linear(spec.dim, spec.classes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.head(self.mixer_blocks(self.stem(x)))
        return logits
