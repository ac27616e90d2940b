"""Reading what `torch.save` wrote, without ever executing what is pickled in it."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch

from ...errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"
HARMLESS = re.compile(r"torch\.(?!nn\.modules)|collections\.OrderedDict|argparse\.Namespace")
"""What every checkpoint refers to."""

RESAVE = "re-save the weights alone: torch.save(model.state_dict(), …) or safetensors"
DAMAGED = "copy or download the file again; it was probably cut short"


def load_pickled(path: Path) -> Any:
    """Returns the object that `torch.save` put in `path`, its tensors memory-mapped where possible.

    Only tensors, containers and numbers are read, and the `argparse.Namespace` in which training
    scripts keep their options. Raises CheckpointError for a file that is damaged or not of
    `torch.save`, and for one that holds anything else: loading that would run code.
    """
    with path.open("rb") as file:
        is_zip = file.read(4) == ZIP_MAGIC
    try:
        # Files of before torch 1.6 are no zip archives and cannot be mapped.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refusal(path, is_zip, str(error)) from error
    except OSError:
        raise  # not damaged but unreadable: read_checkpoint names it
    except Exception as error:  # a damaged pickle fails in any way: KeyError, EOFError, …
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: a TorchScript archive, not weights", hint=RESAVE
            ) from error
        raise CheckpointError(
            f"{path}: damaged, or not a file that torch.save wrote ({_reason(error)})",
            hint=DAMAGED,
        ) from error


def _refusal(path: Path, is_zip: bool, message: str) -> CheckpointError:
    """The error for a pickle that torch would not read; names what it asked for."""
    names = re.findall(r"GLOBAL ([\w.]+)", message)
    if is_zip:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        names += [name for name in unsafe if name != "argparse.Namespace"]
    elif not names:
        names = [name for name in _pickled_globals(path) if not HARMLESS.match(name)]
    if not names:
        return CheckpointError(f"{path}: damaged, or not a file that torch.save wrote", hint=RESAVE)
    return _refused(path, names)


def _refused(path: Path, names: list[str]) -> CheckpointError:
    unique = list(dict.fromkeys(names))
    listed = ", ".join(f"`{name}`" for name in unique[:5])
    if any(name.startswith("torch.nn.modules.") for name in unique):
        what = f"holds a whole pickled module and needs {listed}"
    else:
        what = f"would have to run {listed} to load"
    return CheckpointError(
        f"{path}: {what}; refused: moexport never executes pickled code", hint=RESAVE
    )


def _pickled_globals(path: Path) -> list[str]:
    """Names that the pickles in a file refer to, read without executing them."""
    names: list[str] = []
    with path.open("rb") as file:
        while True:
            try:
                names += _globals_of_next_pickle(file)
            except (ValueError, IndexError, UnicodeDecodeError):
                return names


def _globals_of_next_pickle(file: IO[bytes]) -> list[str]:
    names: list[str] = []
    strings: list[str] = []
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            names.append(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
            names.append(".".join(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
    return names


def _reason(error: Exception) -> str:
    if "central directory" in str(error):
        return "the end of the zip archive is missing"
    first_line = str(error).partition("\n")[0][:200]
    return first_line if " " in first_line else type(error).__name__
