"""The errors a user can meet: each says what was wrong and where, and its hint says what to do."""

from __future__ import annotations

import errno
import re
from typing import ClassVar


class MoexportError(Exception):
    """Root of every error that moexport raises on purpose.

    `message` says what is wrong and where (the file, layer or option); `hint` says what to do,
    in the words of the class (`HINT`) where nothing more exact is given.
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
    """A checkpoint cannot be read, or is not the model that it claims to be."""

    HINT = "give the file that the training code saved; docs/families.md lists the formats"


class FamilyError(MoexportError):
    """The family of a checkpoint is unknown, ambiguous or lacks configuration."""

    HINT = "docs/families.md lists the settings of each family; give them with --set or --config"


class MissingSettingsError(FamilyError):
    """Settings that no shape tells were not given; `examples` has a value of each that would do."""

    def __init__(
        self, message: str, *, hint: str | None = None, examples: dict[str, object] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.examples = examples or {}


class TraceError(MoexportError):
    """The model cannot be traced to a graph."""


class LoweringError(MoexportError):
    """No lowering, or not the requested one, supports a layer."""


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
    """The cache of a text does not fit into the memory."""

    HINT = "--context N makes it smaller, --max-tokens too"


class ForeignEngineError(EngineError):
    """An engine is for another GPU, driver or version than those of this machine."""


class UntrustedEngineError(EngineError):
    """An engine was built elsewhere: it may execute code, and needs the user's consent."""


class ResultsError(MoexportError):
    """A results file cannot be read, or is not one."""

    HINT = "give a results.json that `moexport bench` wrote"


class LocationError(MoexportError):
    """What a URL names cannot be read."""

    HINT = "check the URL and the connection, or copy the files and give their path"


class ClusterError(MoexportError):
    """A Ray cluster cannot be reached, or cannot do what is asked of it."""

    HINT = "docs/scale-out.md says what a cluster needs"


class QueueFullError(MoexportError):
    """A request found the queue full: it was refused at once, and nothing computes it."""

    HINT = "send fewer requests a second, or try again"


class OutputError(MoexportError):
    """A file or folder cannot be written."""


class PluginError(MoexportError):
    """A plugin cannot be loaded, or takes a name that another has."""


class MissingExtraError(MoexportError):
    """A package that this step needs is not installed."""


def install(*extras: str, index: str | None = None) -> str:
    """Returns what installs moexport with extras: in a clone, since no package index has it."""
    options = f"--extra-index-url {index} " if index else ""
    return f"pip install {options}'.[{','.join(extras)}]' in a clone of moexport"


NO_MEMORY = (
    r"failed to map segment|([Cc]an't|[Cc]annot) allocate memory|bad_alloc|bad allocation"
    r"|(error return|NULL) without (exception set|setting an exception)"
)
"""How the system's loader, C++ and PyTorch say that there is no memory: compiled on use."""


def tells_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory.

    Extensions tell of it in words of their own, or in none: a failed allocation that goes
    unnoticed ends in CPython's `SystemError`.
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    words = ImportError | RuntimeError | SystemError
    return isinstance(error, words) and re.search(NO_MEMORY, str(error)) is not None


NO_THREAD = r"can't start new thread|pthread_create failed|Resource temporarily unavailable"
"""How Python, ONNX Runtime and C++ say that the system starts no thread."""


def tells_of_threads(error: BaseException) -> bool:
    """Whether an error says that the system starts no further thread or process."""
    if getattr(error, "errno", None) == errno.EAGAIN:
        return True
    return isinstance(error, RuntimeError) and re.search(NO_THREAD, str(error)) is not None


def in_one_line(error: BaseException) -> str:
    """Returns what an exception says in one line, with its type unless it is our own."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, MoexportError) else f"{type(error).__name__}: {text}"
