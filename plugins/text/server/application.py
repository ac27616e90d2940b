"""The ASGI application for clients: completions, chats, health and metrics.

Clients may be hostile. The size of a request is limited before it is read; its text is parsed and
tokenised outside the event loop; texts take turns, one token each; and a client that disconnects
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
    FAILED,
    CompletionRequest,
    NoSuchModelError,
    ReplyForm,
    error,
    events,
    in_protocol,
)
from .turns import Turns
from .watched import LEFT, TEXT, WatchedRequests

MOST_TEXTS = 64
"""The largest number of texts at once, each with a cache."""

LEAST_BODY = 1 << 20
BODY_TOKEN = 16
"""The largest size of a request in bytes per token of the context; a MiB is always allowed."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
"""Returns freed memory to the system: Linux's C library keeps the memory of small caches."""

TRIM_S = 0.5

RETRY = {"Retry-After": "1"}

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""The names by which a local server may be addressed; an attacker's name server could give this
machine another name."""


def application(model: TextModel, name: str, most: int, host: str = "0.0.0.0") -> WatchedRequests:
    """Returns the server's ASGI application; a text has at most `most` tokens.

    If `host` is a loopback address, it answers only requests to a local name.
    """
    service = _Service(model, name, most, local=is_local(host))
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
        return JSONResponse(error(FAILED, "server_error"), 500)

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
        max_body_size=max(LEAST_BODY, BODY_TOKEN * model.context),
    )
    watched = WatchedRequests(app)
    return watched


def is_local(host: str | None) -> bool:
    """Whether a name is a machine's name for itself."""
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


class _BusyError(MoexportError):
    pass


class _Service:
    """A model, and the texts that it is generating."""

    def __init__(self, model: TextModel, name: str, most: int, *, local: bool) -> None:
        self.model, self.name, self.local = model, name, local
        self.texts = 0
        self._most = min(most, model.context)
        self._trimming: asyncio.TimerHandle | None = None
        self._turns, self._readings = Turns(), Turns()
        self._reading, self._computing = CapacityLimiter(1), CapacityLimiter(1)

    def give_back(self) -> None:
        """Returns freed memory to the system soon, once for all requests that end until then."""
        if _trim is not None and (self._trimming is None or self._trimming.when() < self._now()):
            self._trimming = asyncio.get_running_loop().call_later(TRIM_S, _trim, 0)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Reserves one of the places for texts."""
        if self.texts >= MOST_TEXTS:
            raise _BusyError(f"{MOST_TEXTS} texts are being generated: try again")
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
                return self.model.prompts.completion(body, self.name, self._most, chat=chat)
            except MoexportError as cause:
                # If raised here, the error would refer to itself through the awaited future, and
                # its frames would keep the body until cycles are collected.
                return cause.with_traceback(None)

        # Short requests do not wait for long ones, and those of disconnected clients are not read.
        async with self._readings.turn((len(body), 0.0)):
            if await request.is_disconnected():
                raise ClientDisconnect
            found = await to_thread.run_sync(tokens, limiter=self._reading)
        if isinstance(found, MoexportError):
            try:
                raise found
            finally:
                del found
        completion, ids = found
        return completion, ids, completion.request(self._most)

    async def start(
        self, client: Request, ids: list[int], request: GenerateRequest
    ) -> GeneratedText:
        """Starts a text, unless the client disconnected while it waited."""
        async with self._turns.turn((len(ids) + request.max_tokens, 0.0)):
            if await client.is_disconnected():
                raise ClientDisconnect
            return await to_thread.run_sync(self.model.start, ids, request, limiter=self._computing)

    async def pieces(self, text: GeneratedText, most: int) -> AsyncGenerator[str]:
        """Yields the pieces of a text of `most` tokens; a step without text yields an empty one."""
        while text.finish is None:
            took = text.first_token_s + text.decode_s
            async with self._turns.turn((text.prompt_tokens + most, took), text):
                piece = await to_thread.run_sync(text.step, limiter=self._computing)
            yield piece


class _Completions:
    """Answers requests for texts: an ASGI application."""

    def __init__(self, service: _Service, *, chat: bool) -> None:
        self._service, self._chat = service, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generates a text for a request; always frees its cache at the end."""
        response: Response
        try:
            await self._answer(Request(scope, receive), scope, receive, send)
        except ClientDisconnect:
            response = Response(status_code=LEFT)
        except NoSuchModelError as cause:
            response = JSONResponse(error(cause.message), 404)
        except UsageError as cause:
            response = JSONResponse(error(in_protocol(cause)), 400)
        except (_BusyError, CacheMemoryError) as cause:
            response = JSONResponse(error(cause.message, "server_error"), 503, RETRY)
        else:
            return
        finally:
            self._service.give_back()
        await response(scope, receive, send)

    async def _answer(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        _check_sender(request, local=self._service.local)
        await request.body()
        with self._service.place():
            completion, ids, how = await self._service.read(request, chat=self._chat)
            text = await self._service.start(request, ids, how)
            try:
                scope[TEXT] = text
                response = await self._response(request, completion, text, how.max_tokens)
                await response(scope, receive, send)
            finally:
                text.close()

    async def _response(
        self, request: Request, completion: CompletionRequest, text: GeneratedText, most: int
    ) -> Response:
        form = ReplyForm(chat=self._chat, stream=bool(completion.stream), model=self._service.name)
        pieces = self._service.pieces(text, most)
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
    """Refuses browsers' requests from other sites' pages, and bodies other than JSON."""
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
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "Content-Type: application/json is expected")
