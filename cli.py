"""The program `moexport`: the core's commands, then those of plugins."""

from __future__ import annotations

from .commands.command import Command
from .commands.program import program
from .common.option import unknown_call
from .common.registry import Registry

COMMANDS = Registry(
    "moexport.commands",
    Command,
    (
        Command(
            "inspect",
            "Show a model's family and MoE layers, and what each k costs.",
            "moexport inspect vit.pt --set num_heads=12 --set rest=default",
            "moexport.commands.inspect:inspect",
            10,
            calls=("load", "inspect"),
        ),
        Command(
            "export",
            "Export a checkpoint to a verified bundle of ONNX graphs.",
            "moexport export vit.pt -o out --set num_heads=12 --set rest=default --k 0.25",
            "moexport.commands.export:export",
            30,
            calls=("load", "export"),
        ),
        Command(
            "build",
            "Compile TensorRT engines from a bundle's graphs and add them to it.",
            "moexport build out --compute-capability 8.9 --profile batch=1:8:32",
            "moexport.commands.build:build",
            40,
        ),
        Command(
            "calibrate",
            "Measure tensor ranges on real inputs, for INT8 and FP16.",
            "moexport calibrate vit.pt --data train.npz -o table.json --k 0.25",
            "moexport.commands.calibrate:calibrate",
            50,
            calls=("load", "calibrate"),
        ),
        Command(
            "verify",
            "Check a bundle: hashes, graphs, parity with PyTorch.",
            "moexport verify out",
            "moexport.commands.verify:verify",
            60,
        ),
        Command(
            "run",
            "Run a bundle on the inputs in an .npz file.",
            "moexport run out -i x.npz -o y.npz --k 16",
            "moexport.commands.run:run",
            70,
            calls=("run",),
        ),
        Command(
            "bench",
            "Measure accuracy and latency for every k; write a report.",
            "moexport bench vit.pt -o report --k n,0.5,0.25 --batch 1,16 --data test.npz",
            "moexport.commands.bench:bench",
            110,
            calls=("load", "bench"),
        ),
        Command(
            "report",
            "Rebuild the report of a results file, compare two files, or show several.",
            "moexport report results.json -o report.html",
            "moexport.commands.report:report",
            140,
        ),
        Command(
            "doctor",
            "Show what this machine can build and run, and what is missing.",
            "moexport doctor --json",
            "moexport.commands.doctor:doctor",
            160,
        ),
    ),
    problem=lambda command: next(filter(None, map(unknown_call, command.calls)), ""),
)
"""The help lists commands by `order`; the gaps leave room for commands of plugins."""

app = program(
    "moexport",
    "Deploy trained mixture-of-experts models as ONNX graphs that compute k of n experts.",
    COMMANDS,
)
