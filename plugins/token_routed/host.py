"""The host of `transformers` models (`exporter.model.Host`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from torch import Tensor, nn

from ...exporter.model import Host, Model
from ...graphs.layers.base import sharing_weights
from ...graphs.names import PAST
from .network import TransformersNetwork
from .routers import with_k
from .trace import traced_program


class TransformersHost(Host):
    """The host of all models from `transformers`."""

    per_token = True
    steps = ("generation",)

    def with_k(self, model: Model, k: Mapping[str, int | None]) -> Model:
        """Returns the model as if its configuration had this k (`routers`)."""
        return with_k(model, k)

    def traced(
        self,
        network: nn.Module,
        model: Model,
        sizes: Mapping[str, int],
        fixed: Mapping[str, int],
        *,
        opset: int,
    ) -> ir.Model:
        """Returns the graph that the exporter of `transformers` makes (`trace`)."""
        assert isinstance(network, TransformersNetwork)
        return traced_program(network, model.inputs, model.outputs, sizes, fixed, opset=opset)

    def benchmark(self, model: Model) -> str | None:
        """Returns the benchmark of language models (`plugins.text.language`)."""
        assert isinstance(model.module, TransformersNetwork)
        causal = type(model.module.wrapped).__name__.endswith("ForCausalLM")
        return "language" if causal else None

    def experts_form(self, model: Model) -> str | None:
        """Returns the library's name for its implementation of the experts."""
        network = model.original
        if not isinstance(network, TransformersNetwork):
            return None
        if not network.wrapped._can_set_experts_implementation():
            return None
        form: str = network.wrapped.config._experts_implementation
        return form

    def in_form(self, model: Model, k: Mapping[str, int], form: str | None) -> nn.Module:
        """Returns the library's model with its experts implementation `form`, with these k."""
        network = sharing_weights(model.untouched)
        network.routers = model.module.routers
        chosen = with_k(replace(model, module=network), dict(k)).module
        assert isinstance(chosen, TransformersNetwork)
        if form is not None:
            chosen.wrapped.set_experts_implementation(form)
        return chosen

    def repeated(
        self, network: nn.Module, tensors: Sequence[Tensor]
    ) -> Callable[[], Tensor] | None:
        """Returns a call of the network that can be repeated; None for a network without a cache.

        The cache grows as in text generation, and is cropped before the next call.
        """
        if not (isinstance(network, TransformersNetwork) and network.cached):
            return None
        arguments = network.arguments(tensors)
        cache, before = arguments[PAST], arguments[PAST].get_seq_length()

        def call() -> Tensor:
            if (added := cache.get_seq_length() - before) > 0:
                cache.crop(-added)
            logits: Tensor = network.wrapped(**arguments)["logits"]
            return logits

        return call


HOST = TransformersHost()
