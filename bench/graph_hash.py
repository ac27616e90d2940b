"""The hash of a graph's computation: its nodes and weights, wherever the weights are stored."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx

from ..exporter.bundle.manifest import tensors_in

CHUNK = 16 << 20


def graph_hash(file: Path, known: dict[tuple[str, int, int], str] | None = None) -> str:
    """Returns the SHA-256 of a graph: files with equal hashes have the same nodes and weights.

    Metadata and the location of external weights are ignored. `known` caches the hashes of weights
    between calls, so that shared weights are read once.
    """
    known = {} if known is None else known
    model = onnx.load(file, load_external_data=False)
    del model.metadata_props[:]
    model.graph.name = model.producer_version = model.doc_string = ""
    for tensor in tensors_in(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            path = str(file.parent / entries["location"])
            key = path, int(entries.get("offset", 0)), int(entries.get("length", -1))
            if key not in known:
                known[key] = _bytes_hash(Path(path), *key[1:])
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = known[key].encode()
        del tensor.external_data[:]
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _bytes_hash(file: Path, offset: int, length: int) -> str:
    length = file.stat().st_size - offset if length < 0 else length
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(offset)
        while length and (part := stream.read(min(CHUNK, length))):
            digest.update(part)
            length -= len(part)
    return digest.hexdigest()
