"""Runs every pair of options once for real, and prints what came of it.

python -m moexport.tests.hard.pairs [--json FILE] [--only TEXT] [--jobs N]

Every row's result is a line of JSON in the file from the moment that it is there: what was cut off
goes on from it, and runs again what ended raw.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from moexport.tests.hard.pairs.matrix import all_pairs, alone, commit, pairs, right_pairs, rows
from moexport.tests.hard.pairs.rows import FACTORS, Result, Row, of_source
from moexport.tests.hard.pairs.sources import NAMES

Key = tuple[str, ...]


def key(row: Row) -> Key:
    """A row's values in the order of the factors."""
    return tuple(row[each] for each in FACTORS)


def read(file: Path) -> dict[Key, Result]:
    """The results in a file, the last one of each row; a line that was cut off is none."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            result = Result(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[key(result.row)] = result
    return found


def write(file: Path, result: Result) -> None:
    """Appends a result, and tells of it; a line that was cut off ends before it."""
    cut = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
    with file.open("a") as lines:
        lines.write("\n" * cut + json.dumps(asdict(result)) + "\n")
    said = f": {result.said}" if result.verdict == "raw" else ""
    print(f"{result.verdict} {result.seconds:.1f} s {' '.join(key(result.row))}{said}", flush=True)


def counts(results: Iterable[Result]) -> str:
    """How many rows and pairs there are, and what came of them."""
    results = list(results)
    verdicts = Counter(each.verdict for each in results)
    run = {pair for each in results for pair in pairs(each.row)}
    right = right_pairs(results)
    apart = {p for each in results if each.verdict == "refused" for p in pairs(each.row)} - right
    return (
        f"rows {len(results)}: right {verdicts['right']}, refused {verdicts['refused']}, raw "
        f"{verdicts['raw']}; pairs {len(all_pairs())}: run {len(run)}, right {len(right)}, "
        f"refused {len(apart)}; {sum(each.seconds for each in results):.0f} s"
    )


def everything(wanted: Sequence[Row], file: Path, jobs: int) -> None:
    """Runs the rows that the file lacks, those of a source together, in so many processes."""
    done = read(file)
    wanted = [row for row in wanted if key(row) not in done or done[key(row)].verdict == "raw"]
    groups = {name: [row for row in wanted if row["source"] == name] for name in NAMES}
    work = [(name, group, partial(write, file)) for name, group in groups.items() if group]
    if jobs == 1:
        for each in work:
            of_source(*each)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(of_source, *each) for each in work]):
            ended.result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moexport.tests.hard.pairs")
    parser.add_argument("--json", type=Path, help="a file with a line of JSON for every row")
    parser.add_argument("--only", default="", help="rows with this value alone")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    # What another commit's rows gave says nothing of this one's.
    file = options.json or Path(tempfile.gettempdir()) / f"moexport-pairs-{commit('%h')}.jsonl"
    print(f"results: {file}", flush=True)
    everything([row for row in rows() if options.only in ("", *row.values())], file, options.jobs)
    if not options.only:  # what was refused together with something else
        left = sorted(all_pairs() - right_pairs(read(file).values()))
        apart = {key(row): row for row in map(alone, left)}
        everything(list(apart.values()), file, options.jobs)
    results = read(file).values()
    for each in results:
        if each.verdict == "raw":
            print(f"RAW {dict(each.row)}\n    {each.said}")
    print(counts(results))
    missed = all_pairs() - {p for each in results for p in pairs(each.row)}
    sys.exit(int(any(each.verdict == "raw" for each in results) or bool(missed)))


if __name__ == "__main__":
    main()
