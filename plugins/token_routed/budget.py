"""What a `config.json` may ask for: no more than the headers of the weights beside it hold.

`transformers` builds whatever a configuration says, and a small file may say a million experts. So
its counts are held against the weights' headers first, and what is built without weights after.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules import module as registration

from ...common.documents import read_document
from ...errors import CheckpointError, FamilyError, MoexportError, in_one_line
from . import CONFIG_FILE

COUNTS = re.compile(r"layer|expert|label|block|depth|stage|head|group", re.IGNORECASE)
"""In the names of fields of which a library makes so many things, before or while it builds."""

UNSUSPECTED = 1000
"""What a count may be whatever the weights are: to make so many things costs nothing."""

REGISTERED = 16
"""Modules and parameters for each tensor of the weights: an activation is a module without any."""

SLACK = 2
"""Numbers for each of the weights': tensors that are shared or computed are not saved."""

SAME = "config.json and the weights are of different models"


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """What the headers of a model's files declare: tensors, their numbers, the longest axis."""

    folder: Path
    tensors: int
    numbers: int
    longest: int

    @classmethod
    def of(cls, folder: Path, files: tuple[Path, ...]) -> WeightSizes:
        """Returns what files of safetensors declare, their numbers unread."""
        tensors = numbers = longest = 0
        for path in files:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for key in file.keys():  # noqa: SIM118 (no mapping)
                        shape = file.get_slice(key).get_shape()
                        tensors, numbers = tensors + 1, numbers + math.prod(shape)
                        longest = max(longest, *shape, 0)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: cannot be read: {error}",
                    hint="copy or download the file again; it may not be whole",
                ) from error
        return cls(folder=folder, tensors=tensors, numbers=numbers, longest=longest)

    def check_config(self) -> None:
        """Raises CheckpointError for a `config.json` that is none, or counts what cannot be."""
        file = self.folder / CONFIG_FILE
        left = [read_document(file, "json", CheckpointError)]
        if not isinstance(left[0], dict):
            raise CheckpointError(f"{file}: holds a {type(left[0]).__name__}, not keys and values")
        most = max(UNSUSPECTED, self.tensors, self.longest)
        while left:
            node = left.pop()
            left += [v for v in _values(node) if isinstance(v, dict | list)]
            for key, value in node.items() if isinstance(node, dict) else ():
                if isinstance(value, int | float) and value > most and COUNTS.search(key):
                    raise CheckpointError(
                        f"{file}: {key} is {value}, and the weights are {self.tensors} tensors, "
                        f"none longer than {self.longest}",
                        hint=SAME,
                    )

    def check_built(self, model: nn.Module, *, packed: bool) -> None:
        """Raises CheckpointError for a model of more numbers than the weights could be.

        Numbers that are `packed` are several in one.
        """
        wanted = sum(weight.numel() for weight in model.parameters())
        if wanted > (16 if packed else SLACK) * self.numbers + UNSUSPECTED**2:
            raise CheckpointError(
                f"{self.folder / CONFIG_FILE}: a model of {wanted} parameters, and the weights "
                f"hold {self.numbers}",
                hint=SAME,
            )

    @contextmanager
    def building(self, version: str) -> Iterator[None]:
        """Within the context the library makes models of the configuration.

        What it raises is an error that names the file; so is a model that does not come to an end.
        """
        most = REGISTERED * self.tensors + 2 * UNSUSPECTED
        made = 0

        def count(*_: Any) -> None:
            nonlocal made
            made += 1
            if made > most:
                raise CheckpointError(
                    f"{self.folder / CONFIG_FILE}: a model of more than {most} modules and "
                    f"parameters, and the weights are {self.tensors} tensors",
                    hint=SAME,
                )

        hooks = (
            registration.register_module_module_registration_hook(count),
            registration.register_module_parameter_registration_hook(count),
        )
        try:
            yield
        except (MoexportError, MemoryError):
            raise
        except Exception as error:  # every architecture fails in its own way
            raise FamilyError(
                f"{self.folder}: transformers {version} makes no model of its config.json: "
                f"{in_one_line(error)}",
                hint="the file should be the one that was saved with the weights",
            ) from error
        finally:
            for hook in hooks:
                hook.remove()


def _values(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else list(node)
