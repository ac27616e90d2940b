"""The command `verify`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import api
from ..common.console import show
from ..common.text import lines
from ..errors import CheckError
from ..exporter.requests import VerifyRequest
from .options import AsJson, BundleArgument, Verbosity, json_text

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import Check


def verify(
    *,
    bundle: BundleArgument,
    request: VerifyRequest,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Check a bundle: hashes, graphs, parity with PyTorch.

    Exits with 3 if a check fails.
    """
    checks = []
    for check in api.verify(bundle, request):
        checks.append(check)
        if not as_json and not verbosity.quiet:
            show(check_text(check))
    others = api.others_in(bundle)
    if others:
        verbosity.console().note(f"not of the bundle, and not checked: {', '.join(others[:6])}")
    passed = all(check.passed for check in checks)
    if as_json:
        show(json_text({"passed": passed, "checks": [told(check) for check in checks]}))
    if not passed:
        from ..common.locations import url_of

        failed = [check for check in checks if not check.passed]
        first = f"{failed[0].name}: {failed[0].detail}"
        raise CheckError(
            f"{url_of(bundle) or bundle}: {len(failed)} of {len(checks)} checks failed; {first}",
            hint=failed[0].hint or "export the bundle again, or copy it again",
        )


def told(check: Check) -> dict[str, Any]:
    """A check as JSON, with a hint where it has one."""
    return {name: value for name, value in asdict(check).items() if value is not None}


def check_text(check: Check) -> str:
    """One line of `verify`."""
    return lines(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
