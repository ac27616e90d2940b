"""Limits the sizes in a `config.json` by the headers of the weights next to it.

`transformers` builds any configuration, so a small file could demand a million experts. Its counts
are therefore compared with the weights' headers, and so is the model that `transformers` then
builds without weights.
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

COUNT_FIELDS = re.compile(r"layer|expert|label|block|depth|stage|head|group", re.IGNORECASE)
"""Words in the names of fields that are counts: the library creates that many objects when it
builds the model."""

SMALL_COUNT = 1000
"""Counts up to this are always accepted, because that many objects cost little."""

MODULES_PER_TENSOR = 16
"""The modules and parameters allowed for each tensor, since some modules have no tensors."""

SLACK = 2
"""The parameters allowed for each number in the files: shared and computed ones are not saved."""

MISMATCH = "config.json and the weights belong to different models"


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The counts of tensors and of numbers, and the longest axis, in the headers of the files."""

    folder: Path
    tensors: int
    numbers: int
    longest: int

    @classmethod
    def of(cls, folder: Path, files: tuple[Path, ...]) -> WeightSizes:
        """Returns what safetensors files declare, without reading their values."""
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
        nodes = [read_document(file, "json", CheckpointError)]
        if not isinstance(nodes[0], dict):
            kind = type(nodes[0]).__name__
            raise CheckpointError(f"{file} contains a {kind}, not keys and values")
        limit = max(SMALL_COUNT, self.tensors, self.longest)
        while nodes:
            node = nodes.pop()
            values = node.values() if isinstance(node, dict) else node
            nodes += [value for value in values if isinstance(value, dict | list)]
            for key, value in node.items() if isinstance(node, dict) else ():
                if isinstance(value, int | float) and value > limit and COUNT_FIELDS.search(key):
                    raise CheckpointError(
                        f"{file}: {key} is {value}, but the weights are {self.tensors} tensors "
                        f"with no axis longer than {self.longest}",
                        hint=MISMATCH,
                    )

    def check_built(self, model: nn.Module, *, packed: bool) -> None:
        """Raises CheckpointError for a model with more parameters than the weights could contain.

        With `packed`, one number in the files may contain several parameters.
        """
        parameters = sum(weight.numel() for weight in model.parameters())
        if parameters > (16 if packed else SLACK) * self.numbers + SMALL_COUNT**2:
            raise CheckpointError(
                f"{self.folder / CONFIG_FILE}: the model has {parameters} parameters, but the "
                f"weights have {self.numbers}",
                hint=MISMATCH,
            )

    @contextmanager
    def building(self, version: str) -> Iterator[None]:
        """Checks the models that the library builds from the configuration within the context.

        Raises an error with the file's name if the library fails or the model grows too large.
        """
        limit = MODULES_PER_TENSOR * self.tensors + 2 * SMALL_COUNT
        registered = 0

        def count(*_: Any) -> None:
            nonlocal registered
            registered += 1
            if registered > limit:
                raise CheckpointError(
                    f"{self.folder / CONFIG_FILE}: the model has more than {limit} modules and "
                    f"parameters, but the weights are {self.tensors} tensors",
                    hint=MISMATCH,
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
                f"{self.folder}: transformers {version} cannot build a model from its config.json: "
                f"{one_line(error)}",
                hint="use the file that was saved with the weights",
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
