"""How fast normexp is, compared with what one would use instead: a table, and JSON.

    python scripts/bench.py                         every row
    python scripts/bench.py --only step --quick     sections named like "step", fewer rounds
    python scripts/bench.py --json /tmp/bench.json  the numbers as well

The candidates of a row run alternately in this process (or in processes started alternately). A row
is the median of the ratios of neighbouring measurements, so that a slow minute of the machine
affects both sides. GPU rows appear only on a machine with a GPU, or small on a CPU with --smoke.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_gpu
import bench_norms
import bench_training
import torch
from bench_measure import Bench, Row

from normexp.records.environment import describe_environment

SECTIONS = bench_training.SECTIONS | bench_norms.SECTIONS | bench_gpu.SECTIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there")
    parser.add_argument("--smoke", action="store_true", help="GPU rows on the CPU, tiny")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    words = options.only or [""]
    chosen = [name for name in SECTIONS if any(word in name for word in words)]
    if not chosen:
        parser.error(f"--only {' '.join(words)}: the sections are {', '.join(SECTIONS)}")
    machine = describe_machine()
    for line in machine.items():
        print("# {}: {}".format(*line))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="normexp-bench-") as folder:
        out = options.json.parent if options.json else None
        bench = Bench(options.quick, Path(folder), smoke=options.smoke, out=out)
        for name in chosen:
            for row in SECTIONS[name](bench):
                print(f"{name:<22} {row}", flush=True)
                rows.append(row)
                if options.json:  # after each row: the machine may be lent for minutes
                    table = [{**asdict(row), "met": row.met} for row in rows]
                    content = {"machine": machine, "rows": table}
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(content, indent=1) + "\n")
    missed = [row for row in rows if row.met is False]
    print(f"# {len(rows)} rows, {len(missed)} miss their aim")
    return 0


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return describe_environment(gpu) | {"threads": torch.get_num_threads(), "load": load}


if __name__ == "__main__":
    sys.exit(main())
