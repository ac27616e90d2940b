"""Logs a line for each request and counts requests for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ....common.text import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..generate import GeneratedText

SEND_S = 30.0
"""The time within which a client must read each part of its answer."""

TEXT = "moexport.text"
"""The key of the text in a request's scope."""

DISCONNECTED = 499
"""The status if the client disconnects before it is answered, as in nginx."""

OTHER = "other"
"""The label for all unknown paths, because clients could send any number of them."""

log = logging.getLogger("moexport.serve")


class WatchedRequests:
    """Passes requests to an application; counts, limits and logs them."""

    def __init__(self, app: Any) -> None:
        self._app: ASGIApp = app
        self._paths = {route.path for route in app.routes}
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = self._tokens = 0
        self._seconds = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; logs an error in one line, without a traceback."""
        from anyio import fail_after

        if scope["type"] != "http":
            return
        started, status, problem = perf_counter(), DISCONNECTED, ""

        async def send_within_limit(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            with fail_after(SEND_S):
                await send(message)

        try:
            await self._app(scope, receive, send_within_limit)
        except asyncio.CancelledError:
            problem = " (the server is shutting down)"
        except TimeoutError:
            problem = f" (the client has read nothing for {SEND_S:.0f} s)"
        except Exception as cause:  # noqa: BLE001 - the server continues after any error
            problem = f" ({_describe_error(cause)})"
        finally:
            self._record(scope, status, perf_counter() - started, problem)

    def _record(self, scope: Scope, status: int, seconds: float, problem: str) -> None:
        path = scope["path"] if scope["path"] in self._paths else OTHER
        text: GeneratedText | None = scope.get(TEXT)
        self._requests[path, status] += 1
        self._seconds += seconds
        counts = ""
        if text is not None:
            self._prompt_tokens += text.prompt_tokens
            self._tokens += text.tokens
            counts = f" {text.prompt_tokens}+{text.tokens} tokens"
        client = (scope.get("client") or ("?",))[0]
        log.log(
            logging.ERROR if problem else logging.INFO,
            "%s %s %s %d%s %.3f s%s",
            client,
            printable(scope["method"][:16]),
            path,
            status,
            counts,
            seconds,
            problem,
        )

    def metrics(self, **gauges: float) -> str:
        """Returns all counts in the format of Prometheus."""
        lines = ["# TYPE moexport_requests_total counter"]
        lines += [
            f'moexport_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        counters = {
            "request_seconds": self._seconds,
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._tokens,
        }
        for name, count in counters.items():
            lines += [f"# TYPE moexport_{name}_total counter", f"moexport_{name}_total {count}"]
        for name, value in gauges.items():
            lines += [f"# TYPE moexport_{name} gauge", f"moexport_{name} {value}"]
        return "\n".join([*lines, ""])


def _describe_error(error: BaseException) -> str:
    """Describes an error in one line: its type, message and origin."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    origin = "" if last is None else f", {last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    return printable(f"{type(error).__name__}: {error}"[:500] + origin)
