"""The command `verify`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from ..common.console import show
from ..common.text import lines
from ..errors import CheckError
from ..exporter.requests import VerifyRequest
from .options import BundleArgument, json_text, options_of
from .printing import Printing

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import Check


OPTIONS = options_of(
    VerifyRequest, atol={"min": 0}, rtol={"min": 0}, data={"metavar": "FEED", "kind": str}
)


def verify(
    *, bundle: BundleArgument, request: Annotated[VerifyRequest, OPTIONS], printing: Printing
) -> None:
    """Check a bundle: hashes, graphs, parity with PyTorch.

    Exits with 3 if a check fails.
    """
    from ..exporter.bundle.bundle import Bundle
    from ..exporter.bundle.destination import others_in
    from ..exporter.bundle.manifest import Manifest
    from ..exporter.calls import verify as run_checks

    checks = []
    for check in run_checks(bundle, request):
        checks.append(check)
        if not printing.as_json and not printing.quiet:
            show(check_text(check))
    folder = Bundle.folder(bundle)
    others = others_in(folder, Manifest.read(folder).files)
    if others:
        printing.console().note(
            f"not checked, because they are not part of the bundle: {', '.join(others[:6])}"
        )
    failed = [check for check in checks if not check.passed]
    if printing.as_json:
        show(json_text({"passed": not failed, "checks": [check_json(check) for check in checks]}))
    if failed:
        from ..common.locations import url_of

        first = f"{failed[0].name}: {failed[0].detail}"
        raise CheckError(
            f"{url_of(bundle) or bundle}: {len(failed)} of {len(checks)} checks failed; {first}",
            hint=failed[0].hint or "export the bundle again, or copy it again",
        )


def check_json(check: Check) -> dict[str, Any]:
    """Returns a check as JSON, with its hint, if any."""
    return {name: value for name, value in asdict(check).items() if value is not None}


def check_text(check: Check) -> str:
    """Returns the line that `verify` prints for a check."""
    if check.passed and check.hint:
        return lines(f"noted   {check.name}: {check.detail}; {check.hint}")
    return lines(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
