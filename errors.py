"""The errors a user can meet: each says what was wrong and where, and its hint says what to do."""

from __future__ import annotations


class MoexportError(Exception):
    """Root of every error that moexport raises on purpose.

    `message` says what is wrong and where (the file, layer or option); `hint` says what to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(MoexportError):
    """An option or argument that cannot be meant: exit code 2."""


class CheckpointError(MoexportError):
    """A checkpoint that cannot be read, or that is not the model it claims to be."""


class FamilyError(MoexportError):
    """The family of a checkpoint is unknown, ambiguous or lacks configuration."""


class TraceError(MoexportError):
    """The model cannot be traced to a graph."""


class LoweringError(MoexportError):
    """No lowering, or not the one asked for, can serve a layer."""


class ParityError(MoexportError):
    """The exported graph does not compute what the PyTorch model computes."""


class BundleError(MoexportError):
    """A bundle that is damaged, incomplete or cannot be written."""


class FeedError(MoexportError):
    """Input data that does not fit the model."""


class CalibrationError(MoexportError):
    """Ranges that cannot be found, or a table of them that does not belong to the model."""


class EngineError(MoexportError):
    """An engine that cannot be built, or that cannot be run here."""


class ForeignEngineError(EngineError):
    """A sound engine that is for another GPU, driver or version than the ones here."""


class ResultsError(MoexportError):
    """A results file that cannot be read, or that is not one."""


class OutputError(MoexportError):
    """A file or folder that cannot be written."""


class MissingExtraError(MoexportError):
    """An optional package that this step needs is not installed."""
