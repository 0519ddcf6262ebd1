"""Which normalization layer, and how much does it depend on the batch size?

    normexp.run(["norm=group"])                  trains, and returns the results
    normexp.module(["norm=group"])               the LightningModule, for a Trainer of your own
    normexp.load("runs/STUDY/CELL/seed-0")       a trained network
    normexp.load_study("STUDY")                  a table of runs
    normexp.load_report("STUDY")                 what their report says: comparisons with verdicts
    normexp.confirm_best("STUDY")                the best of many tries, on unused seeds
    normexp.compare(table, arm=...)              verdicts for a table of runs made elsewhere
    normexp.diagnose(model, batches, loss)       why any network evaluates worse than it trains
    normexp.recompute_averages(model, batches)   running averages anew, for norms of any class
    normexp.replace_norms(model, "group", x)     any network with other norms, for your own loop
    normexp.state_as_built(model)                weights of such a network under its authors' names
    normexp.assert_contract(MyNorm)              whether a norm keeps the rules of a norm
    normexp.norms.GroupNorm(64, num_groups=8)    a norm; normexp.norms lists all

Importing normexp imports neither torch nor pandas.
"""

from normexp import norms
from normexp.api import (
    assert_contract,
    compare,
    confirm_best,
    diagnose,
    load,
    load_report,
    load_study,
    module,
    recompute_averages,
    replace_norms,
    run,
    state_as_built,
)

__all__ = [
    "assert_contract",
    "compare",
    "confirm_best",
    "diagnose",
    "load",
    "load_report",
    "load_study",
    "module",
    "norms",
    "recompute_averages",
    "replace_norms",
    "run",
    "state_as_built",
]
