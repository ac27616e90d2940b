"""A command in a separate module, so that `moexport count --help` imports only what it needs."""

from collections import Counter

import onnx
from moexport.commands.command import Command
from moexport.commands.options import BundleArgument
from moexport.exporter.bundle.bundle import Bundle

API = 1


def count(*, bundle: BundleArgument) -> None:
    """Count the ops of a bundle's graphs."""
    opened = Bundle.open(bundle)
    for graph in opened.manifest.graphs:
        model = onnx.load(opened.graph_file(graph.file), load_external_data=False)
        for op, number in Counter(node.op_type for node in model.graph.node).most_common():
            print(f"{graph.file}  {op}  {number}")


ABOUT = "Count the ops of a bundle's graphs."
COMMAND = Command("count", ABOUT, "moexport count out", "moexport_example_count:count")
