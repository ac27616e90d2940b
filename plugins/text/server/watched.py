"""Logs a line for each request, and counts requests for Prometheus."""

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
"""The time in which a client must read a part of its answer."""

TEXT = "moexport.text"
"""The key of the text in a request's scope."""

LEFT = 499
"""The status if the client disconnects before the answer, as in nginx."""

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
        begun, status, fault = perf_counter(), LEFT, ""

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            with fail_after(SEND_S):
                await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            fault = " (the server ends)"
        except TimeoutError:
            fault = f" (the client has read nothing for {SEND_S:.0f} s)"
        except Exception as cause:  # noqa: BLE001 - whatever it is, the server goes on
            fault = f" ({_describe_error(cause)})"
        finally:
            self._ended(scope, status, perf_counter() - begun, fault)

    def _ended(self, scope: Scope, status: int, seconds: float, fault: str) -> None:
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
            logging.ERROR if fault else logging.INFO,
            "%s %s %s %d%s %.3f s%s",
            client,
            printable(scope["method"][:16]),
            path,
            status,
            counts,
            seconds,
            fault,
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
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = "" if at is None else f", {at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
    return printable(f"{type(error).__name__}: {error}"[:500] + where)
