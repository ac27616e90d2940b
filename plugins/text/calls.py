"""Text from a bundle's language model, as Python calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...common.option import takes
from ...exporter.bundle.bundle import Bundle
from ...exporter.requests import AnyPath
from .request import GenerateRequest, ServeRequest

if TYPE_CHECKING:
    from .generate import GeneratedText, Message, TextModel


def generate_as(
    bundle: Bundle | AnyPath, prompt: str | Sequence[Message], request: GenerateRequest
) -> GeneratedText:
    """Returns the text that a bundle's language model adds to a prompt, an iterator of pieces.

    `prompt` is a text, or the messages of a chat, each with its `role` and `content`. When the text
    has ended, `tokens`, `finish` and `tokens_per_second` of what is returned say what it took.

    Raises:
        UsageError: an option is invalid, or the prompt is longer than the context.
        BundleError: the bundle is of no language model with a tokenizer, or its files have changed.
        MissingExtraError: ONNX Runtime GenAI is not installed.
    """
    return text_model(bundle, request).generate(prompt, request)


def text_model(bundle: Bundle | AnyPath, request: GenerateRequest) -> TextModel:
    """Returns a bundle's language model, ready to generate one text after another."""
    from ...exporter.bundle.bundle import Bundle
    from .generate import TextModel

    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    return TextModel(opened, request.threads, request.context)


def serve_as(bundle: Bundle | AnyPath, request: ServeRequest) -> None:
    """Serves a bundle's language model by the protocol of OpenAI, until it is interrupted.

    Raises:
        UsageError: an option is invalid, or the port is in use.
        BundleError: the bundle is of no language model with a tokenizer, or its files have changed.
        MissingExtraError: ONNX Runtime GenAI or the server is not installed.
    """
    from ...exporter.bundle.bundle import Bundle
    from .server.serve import serve as run

    run(bundle if isinstance(bundle, Bundle) else Bundle.open(bundle), request)


generate = takes(GenerateRequest)(generate_as)
serve = takes(ServeRequest)(serve_as)
