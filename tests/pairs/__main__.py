"""Runs every pair of options once for real, and prints what came of it.

python -m moexport.tests.pairs [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from moexport.tests.pairs.matrix import all_pairs, alone, pairs, right_pairs, rows
from moexport.tests.pairs.rows import Result, Row, of_source
from moexport.tests.pairs.sources import NAMES


def counts(results: Sequence[Result]) -> str:
    """How many rows there are, and what came of them."""
    found = Counter(each.verdict for each in results)
    each = ", ".join(f"{name} {found[name]}" for name in ("right", "refused", "raw"))
    return f"rows {len(results)}: {each}"


def everything(wanted: Sequence[Row], jobs: int) -> list[Result]:
    """Runs rows in processes, those of a source in one."""
    results: list[Result] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        groups = {name: [row for row in wanted if row["source"] == name] for name in NAMES}
        running = [pool.submit(of_source, name, group) for name, group in groups.items() if group]
        for name, each in zip((n for n in NAMES if groups[n]), running, strict=True):
            found = each.result()
            results += found
            print(f"{name}: {counts(found)}", flush=True)
            for result in found:
                if result.verdict == "raw":
                    print(f"RAW {dict(result.row)}\n    {result.said}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moexport.tests.pairs")
    parser.add_argument("--json", type=Path, help="a file for every row with what came of it")
    parser.add_argument("--only", default="", help="rows with this value alone")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    wanted = [row for row in rows() if options.only in ("", *row.values())]
    results = everything(wanted, options.jobs)
    if not options.only:  # what was refused together with something else
        left = sorted(all_pairs() - right_pairs(results))
        results += everything([alone(pair) for pair in left], options.jobs)
    right = right_pairs(results)
    refused = {p for each in results if each.verdict == "refused" for p in pairs(each.row)} - right
    seconds = sum(each.seconds for each in results)
    print(
        f"{counts(results)}; pairs {len(all_pairs())}: right {len(right)}, refused "
        f"{len(refused)}; {seconds:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    sys.exit(int(any(each.verdict == "raw" for each in results)))


if __name__ == "__main__":
    main()
