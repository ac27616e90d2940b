"""Limits the sizes in a `config.json` by the headers of the weights next to it.

`transformers` builds any configuration, and a small file may demand a million experts. Its counts
are therefore compared with the weights' headers, and afterwards the model that it builds without
weights.
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
from ...errors import CheckpointError, FamilyError, MoexportError, one_line
from . import CONFIG_FILE

COUNTS = re.compile(r"layer|expert|label|block|depth|stage|head|group", re.IGNORECASE)
"""Words in the names of fields that are counts: a library creates that many objects before or while
it builds."""

UNSUSPECTED = 1000
"""A count up to this is accepted for any weights: that many objects cost little."""

REGISTERED = 16
"""Modules and parameters for each tensor of the weights: an activation is a module without any."""

SLACK = 2
"""Numbers for each number of the weights: tensors that are shared or computed are not saved."""

SAME = "config.json and the weights belong to different models"


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The contents of the headers of a model's files: tensors, their numbers, the longest axis."""

    folder: Path
    tensors: int
    numbers: int
    longest: int

    @classmethod
    def of(cls, folder: Path, files: tuple[Path, ...]) -> WeightSizes:
        """Returns the declarations of safetensors files, without reading their values."""
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
                    hint="copy or download the file again; it may be incomplete",
                ) from error
        return cls(folder=folder, tensors=tensors, numbers=numbers, longest=longest)

    def check_config(self) -> None:
        """Raises CheckpointError for an invalid `config.json`, or one with impossible counts."""
        file = self.folder / CONFIG_FILE
        left = [read_document(file, "json", CheckpointError)]
        if not isinstance(left[0], dict):
            raise CheckpointError(f"{file} has a {type(left[0]).__name__}, not keys and values")
        most = max(UNSUSPECTED, self.tensors, self.longest)
        while left:
            node = left.pop()
            values = node.values() if isinstance(node, dict) else node
            left += [value for value in values if isinstance(value, dict | list)]
            for key, value in node.items() if isinstance(node, dict) else ():
                if isinstance(value, int | float) and value > most and COUNTS.search(key):
                    raise CheckpointError(
                        f"{file}: {key} is {value}, but the weights are {self.tensors} tensors, "
                        f"none longer than {self.longest}",
                        hint=SAME,
                    )

    def check_built(self, model: nn.Module, *, packed: bool) -> None:
        """Raises CheckpointError for a model with more numbers than the weights could contain.

        Each of the `packed` numbers contains several.
        """
        wanted = sum(weight.numel() for weight in model.parameters())
        if wanted > (16 if packed else SLACK) * self.numbers + UNSUSPECTED**2:
            raise CheckpointError(
                f"{self.folder / CONFIG_FILE}: the model has {wanted} parameters, but the weights "
                f"have {self.numbers}",
                hint=SAME,
            )

    @contextmanager
    def building(self, version: str) -> Iterator[None]:
        """Checks the models that the library makes of the configuration within the context.

        Raises an error with the file's name if the library fails, or if the model grows too large.
        """
        most = REGISTERED * self.tensors + 2 * UNSUSPECTED
        registered = 0

        def count(*_: Any) -> None:
            nonlocal registered
            registered += 1
            if registered > most:
                raise CheckpointError(
                    f"{self.folder / CONFIG_FILE}: the model has more than {most} modules and "
                    f"parameters, but the weights are {self.tensors} tensors",
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
                f"{self.folder}: transformers {version} cannot make a model of its config.json: "
                f"{one_line(error)}",
                hint="use the file that was saved with the weights",
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
