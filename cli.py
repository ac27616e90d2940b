"""The program `moexport`: which commands there are."""

from __future__ import annotations

from .commands.bench import bench, demo, report, specialise
from .commands.build import build, triton
from .commands.export import calibrate, export
from .commands.generate import generate, serve
from .commands.look import adapt, doctor, inspect, run, verify
from .commands.options import program
from .commands.tune import tune

app = program(
    "moexport",
    "Deploy trained mixture-of-experts models as ONNX graphs that compute k of n experts.",
    {
        "moexport inspect vit.pt --set num_heads=12 --set rest=default": inspect,
        "moexport adapt mynet:SoftMoE --set dim=64 --set num_experts=8": adapt,
        "moexport export vit.pt -o out --set num_heads=12 --set rest=default --k 0.25": export,
        "moexport build out --compute-capability 8.9 --profile batch=1:8:32": build,
        "moexport calibrate vit.pt --data train.npz -o table.json --k 0.25": calibrate,
        "moexport verify out": verify,
        "moexport run out -i x.npz -o y.npz --k 16": run,
        'moexport generate out "Once upon a time" --max-tokens 64': generate,
        "moexport serve out --port 8080": serve,
        "moexport triton out -o models --name vit": triton,
        "moexport bench vit.pt -o report --k n,0.5,0.25 --batch 1,16 --data test.npz": bench,
        "moexport specialise digits.pt --data test.npz -o experts": specialise,
        "moexport tune vit.pt --data val.npz --keep 99% -o tuned": tune,
        "moexport report results.json -o report.html": report,
        "moexport demo -o demo": demo,
        "moexport doctor --json": doctor,
    },
)
