"""The Python functions for text from a bundle's language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...common.option import takes
from ...exporter.requests import AnyPath
from .request import GenerateRequest, ServeRequest

if TYPE_CHECKING:
    from ...exporter.bundle.bundle import Bundle
    from .generate import GeneratedText, Message, TextModel


@takes(GenerateRequest)
def generate(
    bundle: Bundle | AnyPath, prompt: str | Sequence[Message], request: GenerateRequest
) -> GeneratedText:
    """Returns an iterator over the text with which a bundle's language model continues a prompt.

    `prompt` is a text, or the messages of a chat, each with its `role` and `content`. At the end,
    `tokens`, `finish` and `tokens_per_second` of the returned object are set.

    Raises:
        UsageError: an option is invalid, or the prompt is longer than the context.
        BundleError: the bundle has no language model with a tokenizer, or its files have changed.
        MissingExtraError: ONNX Runtime GenAI is not installed.
    """
    return text_model(bundle, request).generate(prompt, request)


def text_model(bundle: Bundle | AnyPath, request: GenerateRequest) -> TextModel:
    """Returns a bundle's language model, which can generate any number of texts."""
    from ...exporter.bundle.bundle import Bundle
    from .generate import TextModel

    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    return TextModel(opened, request.threads, request.context)


@takes(ServeRequest)
def serve(bundle: Bundle | AnyPath, request: ServeRequest) -> None:
    """Serves a bundle's language model with OpenAI's protocol until it is interrupted.

    Raises:
        UsageError: an option is invalid, or the port is in use.
        BundleError: the bundle has no language model with a tokenizer, or its files have changed.
        MissingExtraError: ONNX Runtime GenAI or the server is not installed.
    """
    from ...exporter.bundle.bundle import Bundle
    from .server.serve import serve as run

    run(bundle if isinstance(bundle, Bundle) else Bundle.open(bundle), request)
