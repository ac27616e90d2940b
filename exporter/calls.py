"""Calls on a bundle: `build` compiles engines for its graphs, `verify` checks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..common.locations import url_of
from ..common.option import takes
from ..errors import UsageError
from ..graphs.sizes import parse_range
from .bundle.bundle import Bundle
from .bundle.manifest import Check, Manifest
from .requests import AnyPath, BuildRequest, VerifyRequest

if TYPE_CHECKING:
    from ..common.console import Progress
    from .tensorrt.records import EnginePlan


@takes(BuildRequest)
def build(bundle: Bundle | AnyPath, options: BuildRequest) -> Bundle:
    """Compiles engines for a bundle's graphs, adds them to it, and returns the new bundle.

    Raises:
        UsageError: before anything is built, if an option is invalid.
        MissingExtraError: before anything is built, if a package is missing.
        EngineError: no engine can be built for a graph, or a build fails.
    """
    plans = build_plan(bundle, options)
    build_engines(bundle, plans, rebuild=options.rebuild, progress=options.progress)
    return Bundle.open(Bundle.folder(bundle))


def build_plan(bundle: Bundle | AnyPath, options: BuildRequest) -> list[EnginePlan]:
    """Returns the engines that `build` would compile; builds nothing."""
    from .tensorrt.cache import default_cache  # TensorRT is loaded only if an engine is requested
    from .tensorrt.engines import plan_engines
    from .tensorrt.options import EngineOptions

    folder = Bundle.folder(bundle)
    manifest = Manifest.read(folder)
    manifest.check_target(folder)
    ranges = {
        axis: parse_range(sizes, f"--{axis}")
        for axis, sizes in {"batch": options.batch, "tokens": options.tokens}.items()
        if sizes is not None
    }
    engine = options.options or EngineOptions(cache=default_cache())
    target = options.target or manifest.target
    return plan_engines(manifest, target, engine, graph=options.graph, ranges=ranges)


def build_engines(
    bundle: Bundle | AnyPath,
    plans: Sequence[EnginePlan],
    *,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> list[EnginePlan]:
    """Adds the planned engines to a bundle and returns them with their manifest records.

    Raises the errors of `build`.
    """
    if not isinstance(bundle, Bundle) and url_of(bundle) is not None:
        raise UsageError(
            f"{bundle}: engines are written into a bundle, but this one is read from a URL",
            hint="copy the bundle to this machine, build, and copy it back",
        )
    from .bundle.readme import with_readme
    from .bundle.steps import STEPS
    from .tensorrt.engines import add_engines

    folder = Bundle.folder(bundle)
    return add_engines(
        folder,
        Manifest.read(folder),
        plans,
        progress,
        rebuild=rebuild,
        describe=lambda root, manifest: with_readme(root, manifest, tuple(STEPS)),
    )


@takes(VerifyRequest)
def verify(bundle: Bundle | AnyPath, options: VerifyRequest) -> Iterator[Check]:
    """Yields the checks of a bundle as they are made: hashes, valid graphs, parity, engines."""
    opened = Bundle.open(Bundle.folder(bundle))
    for check in opened.verify(
        atol=options.atol, rtol=options.rtol, trust_engine=options.trust_engine, data=options.data
    ):
        if options.progress is not None:
            options.progress.step(check.name)
        yield check
