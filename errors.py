"""The errors that users see: a message that names the fault and where it is, and a hint."""

from __future__ import annotations

import errno
import re
from typing import ClassVar


class MoexportError(Exception):
    """Root of every error that moexport raises on purpose.

    `message` names the fault and where it is (the file, layer or option); `hint` names the remedy,
    by default that of the class (`HINT`).
    """

    HINT: ClassVar[str | None] = None
    EXIT_CODE: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.HINT


class UsageError(MoexportError):
    """An option or argument is invalid."""

    EXIT_CODE = 2
    HINT = "`moexport COMMAND --help` lists the options"


class CheckpointError(MoexportError):
    """A checkpoint cannot be read, or is not of the family that was named."""

    HINT = "give the file that the training code saved; docs/families.md lists the formats"


class FamilyError(MoexportError):
    """The family of a checkpoint is unknown, ambiguous or lacks configuration."""

    HINT = "docs/families.md lists the settings of each family; give them with --set or --config"


class MissingSettingsError(FamilyError):
    """Settings that shapes do not determine are missing; `examples` has a valid value of each."""

    def __init__(
        self, message: str, *, hint: str | None = None, examples: dict[str, object] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.examples = examples or {}


class TraceError(MoexportError):
    """The model cannot be traced to a graph."""


class LoweringError(MoexportError):
    """No lowering supports a layer, or the requested one does not."""


class CheckError(MoexportError):
    """A requested check failed."""

    EXIT_CODE = 3


class ParityError(CheckError):
    """The exported graph does not compute what the PyTorch model computes."""


class BundleError(MoexportError):
    """A bundle is damaged or incomplete, or cannot be written."""

    HINT = "export the bundle again, or copy it again"


class FeedError(MoexportError):
    """Input data do not fit the model."""

    HINT = "`moexport inspect` shows the inputs of the model"


class CalibrationError(MoexportError):
    """Ranges cannot be found, or a table of ranges does not belong to the model."""


class EngineError(MoexportError):
    """An engine cannot be built, or cannot run on this machine."""


class CacheMemoryError(EngineError):
    """The cache of a text does not fit in memory."""

    HINT = "--context N or --max-tokens N makes it smaller"


class ForeignEngineError(EngineError):
    """An engine was built for a GPU, driver or TensorRT version other than this machine's."""


class UntrustedEngineError(EngineError):
    """An engine was built elsewhere: it can execute code, so the user must consent."""


class ResultsError(MoexportError):
    """A file cannot be read as benchmark results."""

    HINT = "give a results.json that `moexport bench` wrote"


class LocationError(MoexportError):
    """A URL cannot be read."""

    HINT = "check the URL and the connection, or copy the files and give their path"


class ClusterError(MoexportError):
    """A Ray cluster cannot be reached, or lacks something that the run needs."""

    HINT = "docs/scale-out.md lists the requirements of a cluster"


class QueueFullError(MoexportError):
    """The queue was full, so a request was refused without being computed."""

    HINT = "send fewer requests per second, or try again"


class OutputError(MoexportError):
    """A file or folder cannot be written."""


class PluginError(MoexportError):
    """A plugin cannot be loaded, or its name is taken."""


class MissingExtraError(MoexportError):
    """A package that this step needs is not installed."""


def install(*extras: str, index: str | None = None) -> str:
    """Returns the command that installs moexport with extras from a clone; no index has it."""
    options = f"--extra-index-url {index} " if index else ""
    return f"pip install {options}'.[{','.join(extras)}]' in a clone of moexport"


NO_MEMORY = (
    r"failed to map segment|([Cc]an't|[Cc]annot) allocate memory|bad_alloc|bad allocation"
    r"|[Cc]ould not allocate|[Ff]ailed to allocate memory"
    r"|(error return|NULL) without (exception set|setting an exception)"
)
"""Messages of the system's loader, C++ and libraries for failed allocations; compiled on use."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out.

    CPython turns a failed allocation that an extension did not report into a `SystemError`.
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    types = ImportError | RuntimeError | SystemError
    return isinstance(error, types) and re.search(NO_MEMORY, str(error)) is not None


NO_THREAD = r"can't start new thread|pthread_create failed|Resource temporarily unavailable"
"""Messages of Python, ONNX Runtime and C++ when the system refuses another thread."""


def is_out_of_threads(error: BaseException) -> bool:
    """Whether an error means that the system refused another thread or process."""
    if getattr(error, "errno", None) == errno.EAGAIN:
        return True
    return isinstance(error, RuntimeError) and re.search(NO_THREAD, str(error)) is not None


def one_line(error: BaseException) -> str:
    """Returns an exception's message on one line, with its type unless it is a `MoexportError`."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, MoexportError) else f"{type(error).__name__}: {text}"
