"""How fast normexp is against what one would use in its place: one command, a table, and JSON.

    python scripts/bench.py                         every row
    python scripts/bench.py --only step --quick     rows whose name contains "step", fewer rounds
    python scripts/bench.py --json /tmp/bench.json  the numbers as well

What is compared runs alternately in this one process (or in processes started alternately), and a
row is the median of the ratios of neighbouring measurements, so that a slow minute of the machine
moves both sides. Rows for a GPU appear only where there is one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import bench_data
import bench_gpu
import bench_norms
import bench_processes
import bench_steps
import bench_study
from bench_measure import Bench, Row, describe_machine

SECTIONS = (bench_steps, bench_data, bench_norms, bench_processes, bench_study, bench_gpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there as well")
    parser.add_argument("--list", action="store_true", help="print the rows' names, measure none")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    measurements = [entry for section in SECTIONS for entry in section.MEASUREMENTS.items()]
    chosen = [
        (name, measure)
        for name, measure in measurements
        if not options.only or any(word in name for word in options.only)
    ]
    if options.list or not chosen:
        print("\n".join(name for name, _ in measurements))
        return 0 if options.list else 2
    machine = describe_machine()
    for line in machine.items():
        print("# {}: {}".format(*line))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="normexp-bench-") as folder:
        bench = Bench(quick=options.quick, folder=Path(folder))
        for name, measure in chosen:
            for row in measure(bench):
                print(f"{name:<22} {row}", flush=True)
                rows.append(row)
            if options.json:
                content = {"machine": machine, "rows": [row.as_dict() for row in rows]}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    missed = [row for row in rows if row.met is False]
    print(f"# {len(rows)} rows, {len(missed)} miss their aim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
