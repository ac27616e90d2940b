"""The ASGI application for clients: completions, chats, health and metrics.

Clients may be hostile. The size of a request is limited before it is read, and its text is parsed
and tokenised outside the event loop. Texts take turns, one token each. A client that disconnects
leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ....errors import CacheMemoryError, MoexportError, UsageError
from ..generate import GeneratedText, TextModel
from ..request import GenerateRequest
from .protocol import (
    SERVER_ERROR,
    CompletionRequest,
    NoSuchModelError,
    ReplyForm,
    error,
    events,
    in_protocol,
)
from .turns import Turns
from .watched import DISCONNECTED, TEXT, WatchedRequests

MAX_TEXTS = 64
"""The largest number of texts that are generated at once, each with a cache."""

MIN_BODY_LIMIT = 1 << 20
BYTES_PER_TOKEN = 16
"""The largest size of a request in bytes per token of the context; a MiB is always allowed."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
"""Returns freed memory to the system, since Linux's C library keeps the memory of small caches."""

TRIM_S = 0.5

RETRY = {"Retry-After": "1"}

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""The names under which a local server accepts requests: an attacker's name server could resolve
any other name to this machine."""


def application(
    model: TextModel, name: str, max_tokens: int, host: str = "0.0.0.0"
) -> WatchedRequests:
    """Returns the server's ASGI application; a text has at most `max_tokens` tokens.

    If `host` is a loopback address, the application answers only requests to a local name.
    """
    service = _Service(model, name, max_tokens, local=is_local(host))
    hosts = [*LOOPBACK, host] if service.local else ["*"]

    async def models(_: Request) -> Response:
        listed = {"id": name, "object": "model", "created": 0, "owned_by": "moexport"}
        return JSONResponse({"object": "list", "data": [listed]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "model": name})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(watched.metrics(texts=service.texts))

    async def refused(_: Request, cause: Exception) -> Response:
        assert isinstance(cause, HTTPException)
        return JSONResponse(error(cause.detail), cause.status_code, cause.headers)

    async def failed(_: Request, __: Exception) -> Response:
        return JSONResponse(error(SERVER_ERROR, "server_error"), 500)

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/completions", _Completions(service, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", _Completions(service, chat=True), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={HTTPException: refused, Exception: failed},
        max_body_size=max(MIN_BODY_LIMIT, BYTES_PER_TOKEN * model.context),
    )
    watched = WatchedRequests(app)
    return watched


def is_local(host: str | None) -> bool:
    """Returns whether a host name is that of the machine itself."""
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


class _BusyError(MoexportError):
    pass


class _Service:
    """A model and the texts that it is generating."""

    def __init__(self, model: TextModel, name: str, max_tokens: int, *, local: bool) -> None:
        self.model, self.name, self.local = model, name, local
        self.texts = 0
        self._max_tokens = min(max_tokens, model.context)
        self._trimming: asyncio.TimerHandle | None = None
        self._turns, self._read_turns = Turns(), Turns()
        self._reading, self._computing = CapacityLimiter(1), CapacityLimiter(1)

    def trim_memory(self) -> None:
        """Schedules the return of freed memory to the system, unless it is already scheduled."""
        if _trim is not None and (self._trimming is None or self._trimming.when() < self._now()):
            self._trimming = asyncio.get_running_loop().call_later(TRIM_S, _trim, 0)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Reserves one of the slots for texts."""
        if self.texts >= MAX_TEXTS:
            raise _BusyError(f"{MAX_TEXTS} texts are being generated: try again")
        self.texts += 1
        try:
            yield
        finally:
            self.texts -= 1

    async def read(
        self, request: Request, *, chat: bool
    ) -> tuple[CompletionRequest, list[int], GenerateRequest]:
        """Returns a request and the tokens of its prompt."""
        body = await request.body()

        def tokens() -> tuple[CompletionRequest, list[int]] | MoexportError:
            try:
                return self.model.prompts.completion(body, self.name, self._max_tokens, chat=chat)
            except MoexportError as cause:
                # If it were raised here, the error would refer to itself through the awaited
                # future, and its frames would keep the body until cycles are collected.
                return cause.with_traceback(None)

        # Short requests do not wait for long ones; those of disconnected clients are not parsed.
        async with self._read_turns.turn((len(body), 0.0)):
            if await request.is_disconnected():
                raise ClientDisconnect
            found = await to_thread.run_sync(tokens, limiter=self._reading)
        if isinstance(found, MoexportError):
            try:
                raise found
            finally:
                del found
        completion, ids = found
        return completion, ids, completion.request(self._max_tokens)

    async def start(
        self, client: Request, ids: list[int], request: GenerateRequest
    ) -> GeneratedText:
        """Starts a text, unless the client disconnected while the request waited."""
        async with self._turns.turn((len(ids) + request.max_tokens, 0.0)):
            if await client.is_disconnected():
                raise ClientDisconnect
            return await to_thread.run_sync(self.model.start, ids, request, limiter=self._computing)

    async def pieces(self, text: GeneratedText, max_tokens: int) -> AsyncGenerator[str]:
        """Yields the pieces of a text of `max_tokens` tokens; some may be empty."""
        while text.finish is None:
            took = text.first_token_s + text.decode_s
            async with self._turns.turn((text.prompt_tokens + max_tokens, took), text):
                piece = await to_thread.run_sync(text.step, limiter=self._computing)
            yield piece


class _Completions:
    """An ASGI application that answers requests for texts."""

    def __init__(self, service: _Service, *, chat: bool) -> None:
        self._service, self._chat = service, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generates a text for a request; always frees its cache at the end."""
        response: Response
        try:
            await self._answer(Request(scope, receive), scope, receive, send)
        except ClientDisconnect:
            response = Response(status_code=DISCONNECTED)
        except NoSuchModelError as cause:
            response = JSONResponse(error(cause.message), 404)
        except UsageError as cause:
            response = JSONResponse(error(in_protocol(cause)), 400)
        except (_BusyError, CacheMemoryError) as cause:
            response = JSONResponse(error(cause.message, "server_error"), 503, RETRY)
        else:
            return
        finally:
            self._service.trim_memory()
        await response(scope, receive, send)

    async def _answer(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        _check_sender(request, local=self._service.local)
        await request.body()
        with self._service.slot():
            completion, ids, options = await self._service.read(request, chat=self._chat)
            text = await self._service.start(request, ids, options)
            try:
                scope[TEXT] = text
                response = await self._response(request, completion, text, options.max_tokens)
                await response(scope, receive, send)
            finally:
                text.close()

    async def _response(
        self, request: Request, completion: CompletionRequest, text: GeneratedText, max_tokens: int
    ) -> Response:
        form = ReplyForm(chat=self._chat, stream=bool(completion.stream), model=self._service.name)
        pieces = self._service.pieces(text, max_tokens)
        if completion.stream:
            stream = events(form, text, pieces, usage=completion.usage)
            return StreamingResponse(stream, media_type="text/event-stream")
        parts: list[str] = []
        async with aclosing(pieces):
            async for piece in pieces:
                parts.append(piece)
                if await request.is_disconnected():
                    raise ClientDisconnect
        return JSONResponse(form.whole("".join(parts), text))


def _check_sender(request: Request, *, local: bool) -> None:
    """Raises `HTTPException` for browsers' requests from other sites and for non-JSON bodies."""
    origin = request.headers.get("origin")
    if local and origin is not None:
        try:
            sender = urlsplit(origin).hostname
        except ValueError:
            sender = None
        if not is_local(sender):
            raise HTTPException(
                403, "Origin: only pages served from this machine may use this server"
            )
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, "Content-Type: application/json is expected")
