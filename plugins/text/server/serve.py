"""Serves a language model with OpenAI's protocol: completions and chats, whole or streamed."""

from __future__ import annotations

import os
import socket

from ....errors import MissingExtraError, UsageError, install
from ....exporter.bundle.bundle import Bundle
from ..generate import TextModel
from ..request import ServeRequest

CLOSING_S = 1
"""How long texts may continue while the server is shutting down."""


def serve(bundle: Bundle, request: ServeRequest) -> None:
    """Serves a bundle's language model until the process is interrupted."""
    try:
        import uvicorn

        from .application import application
        from .connections import Connection, max_connections
    except ImportError as cause:
        raise MissingExtraError(
            f"uvicorn, which serves text, is not installed ({cause})", hint=install("generate")
        ) from cause
    check_free(request.host, request.port)
    model = TextModel(bundle, request.threads, request.context)
    name = request.name or bundle.path.absolute().name
    uvicorn.run(
        application(model, name, request.max_tokens, request.host),
        host=request.host,
        port=request.port,
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,  # `WatchedRequests` logs each request when it ends
        proxy_headers=False,
        server_header=False,
        backlog=max_connections(),  # asyncio accepts all waiting connections before it closes any
        timeout_graceful_shutdown=CLOSING_S,
    )


def check_free(host: str, port: int) -> None:
    """Raises `UsageError` if the port is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            pass
    except OSError as cause:
        raise UsageError(
            f"--port {port}: cannot listen on {host}:{port}: {os.strerror(cause.errno or 0)}",
            hint="another program may be using the port: choose another --port",
        ) from cause
