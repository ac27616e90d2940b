"""A language model served by OpenAI's protocol: completions and chats, whole or streamed."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...common.documents import read_json
from ...errors import MissingExtraError, MoexportError, UsageError, install
from ..bundle.bundle import Bundle
from ..requests import GenerateRequest, ServeRequest
from .generate import GeneratedText, TextModel

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

CLOSING_S = 2
"""So long texts that are being written may go on when the server is told to end."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Whether a stream ends with what it took."""

    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for; the names are the protocol's."""

    model: str = ""
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    best_of: int | None = 1
    echo: bool | None = False
    suffix: str | None = None
    logprobs: bool | int | None = None
    frequency_penalty: float | None = 0
    presence_penalty: float | None = 0
    logit_bias: dict[str, float] | None = field(default_factory=dict)
    tools: list[Any] | None = field(default_factory=list)

    def request(self, most: int) -> GenerateRequest:
        """Returns how to generate it, `most` tokens by default; `UsageError` for what cannot be."""
        for name in UNSERVED:
            if getattr(self, name) and getattr(self, name) != 1:
                raise UsageError(f"{name}: this server does not have it", hint="leave it out")
        longest = self.max_completion_tokens or self.max_tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return GenerateRequest(
            chat=self.messages is not None,
            max_tokens=most if longest is None else longest,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(stop),
        )

    def content(self) -> str | list[dict[str, str]]:
        """Returns the prompt or the messages; `UsageError` for more than one prompt."""
        if self.messages is not None:
            return [{**said, "content": _content(said.get("content"))} for said in self.messages]
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt or []
        if len(prompts) != 1:
            raise UsageError(f"prompt: {len(prompts)} prompts, and one text is expected")
        return prompts[0]


UNSERVED = tuple(field.name for field in fields(Asked))[11:]
"""Fields of the protocol that ask for what this server does not do."""


def serve(bundle: Bundle, request: ServeRequest) -> None:
    """Serves a bundle's language model until the process is interrupted."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError(
            f"uvicorn, which serves text, is not installed ({error})", hint=install("generate")
        ) from error
    check_free(request.host, request.port)
    model = TextModel(bundle, request.threads)
    uvicorn.run(
        application(model, request.name or bundle.path.absolute().name, request.max_tokens),
        host=request.host,
        port=request.port,
        log_level="warning",
        timeout_graceful_shutdown=CLOSING_S,
    )


def check_free(host: str, port: int) -> None:
    """Raises `UsageError` where nothing can listen at a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        raise UsageError(
            f"--port {port}: nothing can listen at {host}:{port}: {os.strerror(error.errno or 0)}",
            hint="another program may have the port: give another --port",
        ) from error


def application(model: TextModel, name: str, most: int) -> Starlette:
    """Returns the server's ASGI application; a text has `most` tokens unless its client says.

    One token is computed at a time, for each text that is being written in turn: ONNX Runtime has
    its own threads for it.
    """
    from anyio import CapacityLimiter, to_thread
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    turn = CapacityLimiter(1)

    async def pieces(text: GeneratedText) -> AsyncIterator[str]:
        while (piece := await to_thread.run_sync(next, text, None, limiter=turn)) is not None:
            yield piece

    async def answer(request: Request, *, chat: bool) -> Response:
        try:
            body = (await request.body()).decode(errors="replace")
            completion = read_json(Asked, body, "the request", error=UsageError)
            if completion.model not in ("", name):
                error = f"model: there is no {completion.model} here, only {name}"
                return JSONResponse(_error(error), status_code=404)
            wanted = completion.messages if chat else completion.prompt
            if wanted is None:
                raise UsageError(f"{'messages' if chat else 'prompt'}: it is missing")
            text = await to_thread.run_sync(
                model.generate, completion.content(), completion.request(most), limiter=turn
            )
        except MoexportError as error:
            return JSONResponse(_error(error.message), status_code=400)
        form = _Form(chat=chat, stream=completion.stream, model=name)
        if completion.stream:
            usage = (
                completion.stream_options is not None and completion.stream_options.include_usage
            )
            return StreamingResponse(
                _events(form, text, pieces(text), usage=usage), media_type="text/event-stream"
            )
        parts: list[str] = []
        async for piece in pieces(text):
            parts.append(piece)
            if await request.is_disconnected():
                break
        return JSONResponse(form.whole("".join(parts), text))

    async def models(_: Request) -> Response:
        listed = {"id": name, "object": "model", "created": 0, "owned_by": "moexport"}
        return JSONResponse({"object": "list", "data": [listed]})

    async def completions(request: Request) -> Response:
        return await answer(request, chat=False)

    async def chats(request: Request) -> Response:
        return await answer(request, chat=True)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
        ]
    )


class _Form:
    """How the protocol writes one answer, or the parts of it."""

    def __init__(self, *, chat: bool, stream: bool, model: str) -> None:
        self.chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
            "object": f"{kind}.chunk" if chat and stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, content: str, text: GeneratedText) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": content}}
        return self._with(said if self.chat else {"text": content}, text.finish, **_usage(text))

    def part(self, piece: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
        delta = {"delta": {"role": "assistant", "content": piece}}
        return self._with(delta if self.chat else {"text": piece}, finish, **more)

    def usage(self, text: GeneratedText) -> dict[str, Any]:
        return {**self._head, "choices": [], **_usage(text)}

    def _with(self, said: Mapping[str, Any], finish: str | None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, **said, "finish_reason": finish, "logprobs": None}
        return {**self._head, "choices": [choice], **more}


async def _events(
    form: _Form, text: GeneratedText, pieces: AsyncIterator[str], *, usage: bool
) -> AsyncIterator[str]:
    """A stream's events: the pieces, the reason of its end, and what it took where that is asked.

    It was answered with success by then: what fails later is an event of its own.
    """
    try:
        async for piece in pieces:
            yield _event(form.part(piece))
        yield _event(form.part("", text.finish))
    except (MoexportError, RuntimeError) as error:
        yield _event(_error(str(error)))
    if usage:
        yield _event(form.usage(text))
    yield "data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(text: GeneratedText) -> dict[str, Any]:
    counts = {"prompt_tokens": text.prompt_tokens, "completion_tokens": text.tokens}
    return {"usage": {**counts, "total_tokens": sum(counts.values())}}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": None}}


def _content(content: Any) -> str:
    """What a message says, which may be in parts; `UsageError` for images and sounds."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if None in parts:
        raise UsageError("messages: a part is no text, and the model takes text alone")
    return "".join(map(str, parts))
