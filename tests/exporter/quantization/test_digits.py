"""INT8 of trained networks: as accurate as FP32 at the same k, with the same experts chosen."""

from __future__ import annotations

from pathlib import Path

import moexport
import numpy as np
import onnx
import pytest
from moexport.exporter.bundle.parity import Reference
from moexport.exporter.model import Model
from moexport.exporter.reference import reference
from moexport.exporter.session import SessionOptions
from moexport.plugins.demo.digits import Training, load_digits, save, train

RANGES_FROM = 256
"""Training images that ranges come from."""


def in_pytorch(model: Model, x: np.ndarray, k: int) -> Reference:
    return reference(model, x, dict.fromkeys(model.layers, k), renormalize=False, batch=len(x))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [16, 64])
def test_int8_keeps_accuracy_and_routing_of_a_trained_network(experts: int, tmp_path: Path) -> None:
    data = load_digits()
    # A fifth of the epochs of the demo: seconds.
    save(train(Training(experts=experts, epochs=12), data.train), tmp_path / "digits.pt")
    model = moexport.load(tmp_path / "digits.pt")
    (layer,) = model.layers
    x, labels = data.test.inputs, data.test.labels
    for k in (experts, experts // 4):
        bundle = moexport.export(
            model,
            tmp_path / f"k{k}",
            k=k,
            precision="int8",
            target="ort-cpu",
            data=data.train.inputs[:RANGES_FROM],
            verify=False,
        )
        chosen = bundle.graph().selected.get(layer)
        observe = {} if chosen is None else {chosen: onnx.TensorProto.INT64}
        session = bundle.session(options=SessionOptions(observe=observe))
        values = session.run(x)
        expected = in_pytorch(model, x, k)
        right = (values[session.output_names[0]].argmax(axis=1) == labels).mean()
        assert abs(right - (expected.y.argmax(axis=1) == labels).mean()) <= 0.005
        assert (chosen is None) == (k == experts)
        if chosen is not None:
            same = (np.sort(values[chosen], axis=1) == expected.selected[layer]).all(axis=1)
            assert same.mean() >= 0.98
        if k == experts:
            assert right > 0.9
