"""Damages bundles in ways that leave them running, and counts what each check refuses.

python -m moexport.tests.hard.mutants --only mixtral --precision int8 --json mutants.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .bases import FORMS, IN_BENCH, Base, bases, subjects
from .damage import DAMAGES
from .judging import Verdict, mutants


def main() -> int:
    """Prints a table and what survived; 1 where something did that is above rounding."""
    parser = argparse.ArgumentParser(prog="python -m moexport.tests.hard.mutants")
    parser.add_argument("--only", default="", help="of the models whose name holds this")
    parser.add_argument("--precision", default="", help="in this precision")
    parser.add_argument("--most", type=int, default=3, help="places of each damage in a graph")
    parser.add_argument("--bench", action="store_true", help="judge the rows of benchmarks, too")
    parser.add_argument("--json", type=Path, help="where every verdict goes")
    options = parser.parse_args()
    verdicts: list[Verdict] = []
    stopped: Counter[str] = Counter()
    begun, graphs = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, load in subjects(folder / "models").items():
            if options.only not in title:
                continue
            subject = load()
            forms = [form for form in subject.forms if options.precision in ("", form[0])]
            for base in bases(subject, folder / "bundles", forms):
                if not isinstance(base, Base):
                    print(f"not exported: {base}", flush=True)
                    continue
                graphs += 1
                found, broken = mutants(
                    base,
                    folder / "damaged",
                    options.most,
                    bench=options.bench and base.form in IN_BENCH,
                )
                verdicts += found
                stopped.update(broken)
                for each in found:
                    if each.survives:
                        print(each.line(), flush=True)
            print(f"{title}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in verdicts]))
    print(table(verdicts))
    survive = sum(each.survives for each in verdicts)
    below = sum(each.below_rounding and not each.killed for each in verdicts)
    killed = sum(each.killed for each in verdicts)
    print(f"graphs {graphs}; damaged graphs that do not run, not counted: {stopped.total()}")
    print(f"below rounding, and passed: {below}, by at most {worst(verdicts)}")
    print(f"mutants killed / made above rounding: {killed} / {killed + survive}")
    if options.bench:
        rows = [each for each in verdicts if each.killed and each.in_bench]
        wrong = [each for each in rows if each.bench is not None]
        print(f"of those, rows of a benchmark that are errors / made: {len(wrong)} / {len(rows)}")
    return int(survive > 0)


def worst(verdicts: Sequence[Verdict]) -> str:
    """Returns by how much what passed changes the outputs, of each precision."""
    most: dict[str, float] = defaultdict(float)
    for each in verdicts:
        if each.below_rounding and not each.killed:
            most[each.precision] = max(most[each.precision], each.effect)
    return ", ".join(f"{name} {effect:.1e} of max|y|" for name, effect in most.items()) or "nothing"


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns a Markdown table: of each damage what was killed of what was made, by precision.

    What is below rounding and passed is in brackets.
    """
    precisions = list(dict.fromkeys(precision for precision, _ in FORMS))
    lines = [f"| damage | {' | '.join(precisions)} |", "|---|" + "---|" * len(precisions)]
    for damage in DAMAGES:
        cells = []
        for precision in precisions:
            of = [v for v in verdicts if (v.damage, v.precision) == (damage.name, precision)]
            killed = sum(each.killed for each in of)
            above = killed + sum(each.survives for each in of)
            passed = len(of) - above
            cells.append(f"{killed}/{above}" + (f" ({passed})" if passed else "") if of else "")
        lines.append(f"| {damage.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
