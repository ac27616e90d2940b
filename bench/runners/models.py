"""Opens the PyTorch model of a case, here or in another process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...data.user_code import names_code
from ...errors import UsageError
from ...exporter.checkpoints.load import load
from ...exporter.checkpoints.loaders import loader_of
from ...exporter.model import Model
from ...exporter.requests import LoadRequest
from ..engines import ModelEngine, engine_of
from ..plan import Candidate, Case, has_token_routed_layer
from .base import Loader, ModelRun, Runner
from .pytorch import CUDA, PyTorch, on_device, with_algorithm_1


def reference_of(candidate: Candidate, k: int) -> PyTorch:
    """Returns the model with k experts, chosen by its router or else by Algorithm 1."""
    if k in candidate.jobs_by_k:
        model = candidate.jobs_by_k[k].model
        if has_token_routed_layer(model):
            return PyTorch(model.module, model.inputs, model.host)
    else:
        model = candidate.model
    ks = candidate.k_by_layer(k) or k
    return with_algorithm_1(model, ks, "masked", renormalize=candidate.renormalize)


@dataclass(frozen=True)
class TorchLoader(Loader):
    """Opens a model as a case runs it; `model_on_device` returns it on its device.

    A loader that is sent to another process loads it there, from the source of `model`. `k` has the
    routers' k by layer, if the layers differ.
    """

    case: Case
    batches: tuple[int, ...]
    renormalize: bool
    model_on_device: Callable[[], Model]
    model: Model | None = None
    k: Mapping[str, int] = field(default_factory=dict)

    def __call__(self) -> Runner:
        kind = engine_of(self.case.engine, self.case.provider)
        if not isinstance(kind, ModelEngine):
            raise UsageError(f"{self.case.engine} does not run PyTorch models")
        run = ModelRun(
            model=self.model_on_device(),
            provider=self.case.provider,
            k=self.case.k,
            k_by_layer=self.k,
            batches=self.batches,
            renormalize=self.renormalize,
            precision=self.case.precision,
        )
        return kind.loader(run)

    def __reduce__(self) -> tuple[type[TorchLoader], tuple[object, ...]]:
        if self.model is None or not self.model.source.loads_elsewhere:
            raise TypeError("a model without a source cannot be opened by another process")
        source, by_code = self.model.source, names_code(self.model.source.path)
        request = LoadRequest(
            family=None if by_code else self.model.family,
            config=self.model.config,
            example=self.model.example if by_code else None,
            further=source.further,
        )
        reload = functools.partial(_loaded_on, source.path, self.case.provider, request)
        return TorchLoader, (self.case, self.batches, self.renormalize, reload, None, self.k)


def _loaded_on(source: str, provider: str, request: LoadRequest) -> Model:
    model = reload_model(source, request)
    return on_device(model, CUDA) if provider == CUDA else model


def reload_model(source: str, request: LoadRequest) -> Model:
    """Returns the model of a source with a known family and configuration."""
    found = None if request.family is None else loader_of(Path(source))
    if found is not None and found[1] == request.family:  # the files have other settings
        config = request.config if isinstance(request.config, Mapping) else {}
        settings = {key: config[key] for key in found[0].settings if key in config}
        request = replace(request, family=None, config=settings)
    return load(source, request)


def loaders(candidate: Candidate, batches: Sequence[int] = (1,)) -> dict[Case, Loader]:
    """Returns the cases of a candidate with their loaders."""
    models = {id(own): _by_provider(own.model) for own in (candidate, *candidate.distinct_bundles)}
    opening: dict[Case, Loader] = {}
    for case, graph in candidate.cases.items():
        own = candidate.for_case(case)
        opening[case] = (
            graph.loader
            if graph is not None
            else TorchLoader(
                case=case,
                batches=tuple(batches),
                renormalize=own.renormalize,
                model_on_device=models[id(own)][case.provider],
                model=own.model,
                k=own.k_by_layer(case.k),
            )
        )
    return opening


def _by_provider(model: Model) -> dict[str, Callable[[], Model]]:
    """Returns, for each provider, a function that returns the model on its device."""
    return {
        "cpu": lambda: model,
        # One copy on the GPU, made on first use and shared by all engines on it.
        CUDA: functools.cache(lambda: on_device(model, CUDA)),
    }
