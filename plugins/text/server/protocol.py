"""Parses requests and formats answers in OpenAI's protocol."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from ....common.documents import from_data
from ....common.option import declared, spelled
from ....common.text import printable
from ....errors import MoexportError, UsageError
from ..request import GenerateRequest

MAX_STOPS = 8
MAX_STOP_CHARACTERS = 256
"""The largest length of a stop text, since every token is compared with all stop texts."""

IGNORED_FIELDS = frozenset(
    ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
)
"""Fields that are ignored, because they do not change the text."""

NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "frequency_penalty": 0,
    "min_p": 0,
    "modalities": ["text"],
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "tool_choice": "none",
}
"""Values without effect, which are accepted for fields that are not supported."""

SERVER_ERROR = "the server failed; see its log"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream; `include_usage`: it ends with the number of tokens."""

    include_usage: bool = False


class WrittenText(Protocol):
    """A generated text, with the properties that a reply reports."""

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        ...

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        ...

    @property
    def finish(self) -> str | None:
        """Why the text ended; None until then."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A client's request; the names of its fields are the protocol's, except `top_k`."""

    model: str = ""
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def request(self, limit: int) -> GenerateRequest:
        """Returns the options for at most `limit` tokens; raises `UsageError` for invalid ones."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        requested: int | None = getattr(self, name)
        if requested is not None and not 1 <= requested <= limit:
            raise UsageError(f"{name} {requested}: it must be from 1 to {limit}")
        stop = tuple([self.stop] if isinstance(self.stop, str) else self.stop or ())
        if len(stop) > MAX_STOPS or max(map(len, stop), default=0) > MAX_STOP_CHARACTERS:
            raise UsageError(
                f"stop: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters are supported"
            )
        return GenerateRequest(
            max_tokens=limit if requested is None else requested,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=stop,
        )

    def content(
        self, *, chat: bool, limit: int, reads: frozenset[str]
    ) -> str | list[dict[str, str]]:
        """Returns the prompt, or up to `limit` messages with the text fields that a template reads.

        Raises `UsageError` unless there is exactly one prompt and it is text.
        """
        field, other = ("messages", "prompt") if chat else ("prompt", "messages")
        if getattr(self, field) is None:
            raise UsageError(f"{field}: it is missing")
        if getattr(self, other) is not None:
            raise UsageError(f"{other}: this endpoint expects {field} instead")
        if self.messages is not None:
            if len(self.messages) > limit:
                raise UsageError(f"messages: {len(self.messages):,}, but only {limit:,} tokens fit")
            return [
                _message(message, f"messages[{i}]", reads)
                for i, message in enumerate(self.messages)
            ]
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt or []
        if len(prompts) != 1:
            raise UsageError(f"prompt: there are {len(prompts)} prompts, but one text is expected")
        return prompts[0]


class NoSuchModelError(UsageError):
    """A request for a model that is not served."""


SUPPORTED_FIELDS = IGNORED_FIELDS | {field.name for field in fields(CompletionRequest)}


def parse_request(body: bytes) -> CompletionRequest:
    """Parses a body; raises `UsageError` for an invalid or unsupported request."""
    try:
        data = msgspec.json.decode(body)  # without types, because those are slow for many values
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as cause:
        raise UsageError(f"the request is not valid JSON: {str(cause)[:200]}") from cause
    if not isinstance(data, dict):
        raise UsageError("the request is not a JSON object")
    _check_supported({name: data[name] for name in data if name not in SUPPORTED_FIELDS}, "")
    return from_data(CompletionRequest, data, "the request", error=UsageError)


def in_protocol(error: MoexportError) -> str:
    """Returns an error's message with the protocol's field names instead of options."""
    message = error.message
    for name in declared(GenerateRequest):
        message = message.replace(spelled(GenerateRequest, name), name)
    return message


def _check_supported(data: Mapping[str, Any], where: str) -> None:
    """Raises `UsageError` for a field that this server does not support."""
    for name, value in data.items():
        empty = value is None or value is False or value in ("", [], {})
        neutral = not isinstance(value, bool) and name in NEUTRAL and value == NEUTRAL[name]
        if not (empty or neutral):
            raise UsageError(
                f"{where}{printable(name[:64])}: this server does not support the field; omit it"
            )


def _message(message: Mapping[str, Any], where: str, reads: frozenset[str]) -> dict[str, str]:
    """Returns a message for a template: its role, content and other text fields that it reads."""
    role = message.get("role")
    if not (isinstance(role, str) and role):
        raise UsageError(f"{where}.role: it must be text")
    texts = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and name in reads and isinstance(value, str)
    }
    others = {name for name in message if name not in texts} - {"role", "content"}
    _check_supported({name: message[name] for name in others}, f"{where}.")
    return {"role": role, "content": _content(message.get("content"), where), **texts}


def _content(content: Any, where: str) -> str:
    """Returns a message's content, joining its parts; raises `UsageError` unless it is text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UsageError(f"{where}.content: it must be text")
    parts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in content
    ]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise UsageError(f"{where}.content: a part is not text, but the model accepts only text")
    return "".join(texts)


class ReplyForm:
    """Formats an answer or its parts as the protocol requires."""

    def __init__(self, *, chat: bool, stream: bool, model: str) -> None:
        self.chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
            "object": f"{kind}.chunk" if chat and stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, content: str, text: WrittenText) -> dict[str, Any]:
        answer = {"message": {"role": "assistant", "content": content}}
        return self._reply(answer if self.chat else {"text": content}, text.finish, **_usage(text))

    def part(self, piece: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
        delta = {"delta": {"role": "assistant", "content": piece}}
        return self._reply(delta if self.chat else {"text": piece}, finish, **more)

    def usage(self, text: WrittenText) -> dict[str, Any]:
        return {**self._head, "choices": [], **_usage(text)}

    def _reply(self, answer: Mapping[str, Any], finish: str | None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, **answer, "finish_reason": finish, "logprobs": None}
        return {**self._head, "choices": [choice], **more}


async def events(
    form: ReplyForm, text: WrittenText, pieces: AsyncIterator[str], *, usage: bool
) -> AsyncIterator[str]:
    """Yields a stream's events: the pieces, the finish reason, and the usage if requested.

    An error is a separate event, because the status has already been sent.
    """
    try:
        async for piece in pieces:
            yield event(form.part(piece))
        yield event(form.part("", text.finish))
    except MoexportError as cause:
        yield event(error(in_protocol(cause), "server_error"))
    except Exception:
        yield event(error(SERVER_ERROR, "server_error"))
        raise
    if usage:
        yield event(form.usage(text))
    yield "data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def error(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": None}}


def _usage(text: WrittenText) -> dict[str, Any]:
    counts = {"prompt_tokens": text.prompt_tokens, "completion_tokens": text.tokens}
    return {"usage": {**counts, "total_tokens": sum(counts.values())}}
