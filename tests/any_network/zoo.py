"""Holds a zoo of foreign networks to what `replace_norms` and `diagnose` promise of any network.

    python tests/any_network/zoo.py [--networks own|packages|all] [--seed 0] [PART OF A NAME ...]

Prints a line for each network: ok, refused (why), or WRONG (what); exits with 1 if any is wrong.
`--seed` chooses the networks of packages. Everything is tried anew, in double precision:

- split: in training mode, outputs and gradients of 4 samples at norm_batch_size=2 are those of two
  passes of 2 samples from the same state, unless a line says that this is untried;
- anew: with its own norms put in anew, a network trains as before;
- remedy: no finding of a diagnosis costs more than the gap, and no two cost the same.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from zoo_case import LEFT_ALONE, REFUSED, RIGHT, UNTRIED, Case, Sample, call
from zoo_forwards import FORWARDS
from zoo_maps import MAPS
from zoo_rows import ROWS

import normexp
from normexp.errors import UserError, one_line
from normexp.norms.site import names_as_built, state_as_built
from normexp.training.batching.copies import copied

SIZE = 2  # norm_batch_size
TOLERANCE = 1e-5  # relative to the largest value, in double precision
FLOAT_TOLERANCE = 1e-2  # of a network that does not run in double precision
STEPS = 3
BATCHES = 4  # of a diagnosis
TO_SPLIT: dict[str, dict[str, Any]] = {"batch": {}, "group": {"num_groups": 1}, "as_built": {}}


class Wrong(Exception):
    """What does not hold for a network."""


@dataclass
class Verdict:
    """What came out for one network: lines of the log, and what is refused or wrong, and why."""

    lines: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def trying(self, what: str) -> Iterator[list[str]]:
        """Notes how a trial ends; yields the lines that it logs."""
        handler = Lines()
        logging.getLogger("normexp").addHandler(handler)
        try:
            yield handler.lines
        except UserError as error:
            self.refused[what] = str(error)
        except Wrong as error:
            self.wrong[what] = str(error)
        except Exception as error:  # no network may make normexp crash
            self.wrong[what] = f"raises {one_line(error)}"
        finally:
            logging.getLogger("normexp").removeHandler(handler)
            self.lines += handler.lines

    def __str__(self) -> str:
        parts = [f"WRONG: {what}: {why}" for what, why in self.wrong.items()]
        for why in sorted(set(self.refused.values())):
            names = [name for name, other in self.refused.items() if other == why]
            parts.append(f"refused: {', '.join(names)}: {why}")
        parts += sorted({line for line in self.lines if "untried" in line})
        return "; ".join(parts) or "ok"


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check(case: Case) -> Verdict:
    """Tries everything on one network."""
    verdict = Verdict()
    torch.manual_seed(0)
    network = case.build()
    samples = [case.draw() for _ in range(2 * SIZE)]
    inputs = case.inputs(samples)
    for norm, knobs in TO_SPLIT.items():
        with verdict.trying(f"{norm} at {SIZE}") as lines:
            other = normexp.replace_norms(network, norm, inputs, norm_batch_size=SIZE, **knobs)
            whole = normexp.replace_norms(network, norm, inputs, **knobs)
            if not any("untried" in line for line in lines):
                check_split(other, whole, case, samples)
    own = {} if case.own is None else {case.own: case.knobs}
    for norm, knobs in {**own, "as_built": {}}.items():
        with verdict.trying(f"{norm} anew"):
            other = normexp.replace_norms(network, norm, inputs, **knobs)
            check_anew(network, other, inputs)
            if case.alone:
                check_alone(network, other, samples[0])
    with verdict.trying("diagnose"):
        check_diagnosis(network, case)
    check_expected(case.expected, verdict)
    return verdict


def check_split(split: nn.Module, whole: nn.Module, case: Case, samples: list[Sample]) -> None:
    """Raises Wrong unless a pass of all samples, split, is two passes of half of them, whole."""
    passes = [without_dropout(copied(one)).train() for one in (split, whole, whole)]
    tolerance = max(to_double(one, case.inputs(samples)) for one in passes)
    outputs = []
    for network, some in zip(passes, (samples, samples[:SIZE], samples[SIZE:]), strict=True):
        torch.manual_seed(1)
        outputs.append(values_in(call(network, widened(case.inputs(some), network))))
    pairs = [*matched(*outputs, case.axis)]
    losses = [torch.zeros(()), torch.zeros(())]
    for whole, parts in pairs:
        compare("outputs of a pass and of two passes", whole, parts, tolerance)
        weights = weights_like(whole)
        losses[0] = losses[0] + (whole * weights).sum()
        losses[1] = losses[1] + (parts * weights).sum()
    if not pairs or not losses[0].requires_grad:
        return
    for loss in losses:
        loss.backward()
    one, *two = (dict(network.named_parameters()) for network in passes)
    scale = max(1.0, *(float(gradient(parameter).abs().max()) for parameter in one.values()))
    for name, parameter in one.items():
        parts = gradient(two[0][name]) + gradient(two[1][name])
        compare(f"gradients of {name}", gradient(parameter), parts, tolerance * scale)


def matched(
    whole: list[Tensor], first: list[Tensor], second: list[Tensor], axis: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs outputs of a pass with those of two passes; skips what has no axis of samples."""
    if len(whole) == len(first) + len(second) > len(first):  # a list with an item for each sample
        yield from zip(whole, first + second, strict=True)
        return
    for value, *parts in zip(whole, first, second, strict=True):
        if value.ndim > axis and value.shape[axis] == sum(part.shape[axis] for part in parts):
            yield value, torch.cat(parts, axis)


def check_anew(network: nn.Module, other: nn.Module, inputs: Any) -> None:
    """Raises Wrong unless both train alike from here on."""
    pair = copied(network).train(), copied(other).train()
    tolerance = max(to_double(one, inputs) for one in pair)
    names = names_as_built(pair[1])
    trained = [
        {name for name, p in pair[0].named_parameters() if p.requires_grad},
        {names[name] for name, p in pair[1].named_parameters() if p.requires_grad},
    ]
    if trained[0] != trained[1]:
        raise Wrong(f"other parameters are trained: {sorted(trained[0] ^ trained[1])}")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01, weight_decay=0.1) for one in pair]
    for step in range(STEPS):
        outputs = []
        for one, optimizer in zip(pair, optimizers, strict=True):
            torch.manual_seed(step)
            outputs.append(values_in(call(one, widened(inputs, one))))
            loss = sum(
                (value * weights_like(value)).mean() for value in outputs[-1] if value.numel()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for expected, output in zip(*outputs, strict=True):
            compare(f"outputs in training after {step} steps", expected, output, tolerance)
    outputs = []
    for one in pair:
        torch.manual_seed(STEPS)
        outputs.append(values_in(call(one.eval(), widened(inputs, one))))
    for expected, output in zip(*outputs, strict=True):
        compare("outputs in evaluation", expected, output, tolerance)
    check_state(*pair, tolerance)


def check_state(network: nn.Module, other: nn.Module, tolerance: float) -> None:
    """Raises Wrong unless both save the same values under the same names."""
    expected, state = network.state_dict(), state_as_built(other)
    for name in state.keys() - expected.keys():
        if name.endswith("num_batches_tracked"):  # a norm of another class may count
            del state[name]
    if expected.keys() != state.keys():
        raise Wrong(f"other names are saved: {sorted(expected.keys() ^ state.keys())}")
    for name, value in expected.items():
        compare(f"saved {name}", value.double(), state[name].double(), tolerance)


def check_alone(network: nn.Module, other: nn.Module, sample: Sample) -> None:
    """Raises Wrong unless a sample without its axis is evaluated as before."""
    with torch.no_grad():
        outputs = [values_in(call(one.eval(), sample)) for one in (network, other)]
    for expected, output in zip(*outputs, strict=True):
        compare("outputs of one sample without its axis", expected, output, 1e-4)


def check_diagnosis(network: nn.Module, case: Case) -> None:
    """Raises Wrong for a finding that costs more than the gap, or as much as another one."""
    model = copied(network).train()
    batches: list[Any] = []
    for _ in range(BATCHES):
        inputs = case.inputs([case.draw() for _ in range(2 * SIZE)])
        batches.append(inputs if isinstance(inputs, Mapping) else (inputs, None))
        call(model, inputs)
    result = normexp.diagnose(model, batches, mean_square)
    costs = {finding.kind: finding.cost for finding in result.findings if finding.cost}
    gap = result.gap
    for kind, cost in costs.items():
        margin = 3 * (cost.error + gap.error) + 0.01 * abs(result.training)
        if abs(cost.value) > abs(gap.value) + margin:
            raise Wrong(f"{kind} costs {cost}, and the gap is {gap}")
    values = [cost.value for cost in costs.values()]
    if len(set(values)) < len(values):
        raise Wrong(f"two findings cost the same: {', '.join(map(str, costs.values()))}")


def check_expected(expected: str, verdict: Verdict) -> None:
    """Notes where batch norm at a size came to something else than expected."""
    split = f"batch at {SIZE}"
    if split in verdict.wrong or expected == REFUSED:
        return
    seen = {
        RIGHT: split not in verdict.refused and "untried" not in str(verdict),
        UNTRIED: split not in verdict.refused and "untried" in str(verdict),
        LEFT_ALONE: any("left alone" in line for line in verdict.lines),
    }
    if not seen.get(expected, True):
        verdict.wrong["expected"] = expected


def values_in(output: Any) -> list[Tensor]:
    """The tensors of an output that have a gradient or could have one."""
    if is_dataclass(output):
        output = vars(output)
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def mean_square(output: Any, _: Any) -> Tensor:
    values = [value.square().mean() for value in values_in(output) if value.numel()]
    return torch.stack([value.float() for value in values]).mean()


def to_double(network: nn.Module, inputs: Any) -> float:
    """Turns a network to double precision, where it runs in that; returns the tolerance."""
    try:
        call(copied(network).double(), widened(inputs, nn.Linear(1, 1).double()))
    except (RuntimeError, TypeError, ValueError):
        return FLOAT_TOLERANCE
    network.double()
    return TOLERANCE


def widened(inputs: Any, network: nn.Module) -> Any:
    """The inputs in the precision of the network."""
    dtypes = [p.dtype for p in network.parameters() if p.is_floating_point()]
    return tree_map_only(
        Tensor, lambda x: x.to(dtypes[0]) if x.is_floating_point() and dtypes else x, inputs
    )


def without_dropout(network: nn.Module) -> nn.Module:
    """Sets the probabilities of dropout and of skipped paths to 0."""
    for module in network.modules():
        for name, value in vars(module).items():
            if (name == "p" or "drop" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
    return network


def weights_like(value: Tensor) -> Tensor:
    """Draws the same weights for the same shape."""
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)


def gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def compare(what: str, expected: Tensor, value: Tensor, tolerance: float) -> None:
    """Raises Wrong where values differ by more than `tolerance` of the largest, or of 1."""
    if expected.shape != value.shape:
        raise Wrong(f"{what}: shapes {tuple(expected.shape)} and {tuple(value.shape)}")
    if not expected.numel():
        return
    difference = (expected - value).abs().nan_to_num(torch.inf)
    difference[expected.isnan() & value.isnan()] = 0
    scale = max(1.0, float(expected.abs().nan_to_num(0).max()))
    if float(difference.max()) > tolerance * scale:
        raise Wrong(f"{what} differ by {float(difference.max()):.2g} of {scale:.2g}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--networks", choices=["own", "packages", "all"], default="all")
    parser.add_argument("--seed", type=int, default=0, help="chooses networks of packages")
    parser.add_argument("names", nargs="*", help="parts of names; none: all networks")
    arguments = parser.parse_args(argv)
    cases: list[Case] = []
    if arguments.networks != "packages":
        cases += [*MAPS, *ROWS, *FORWARDS]
    if arguments.networks != "own":
        from zoo_packages import choose  # here, as the packages load slowly

        cases += choose(arguments.seed)
    logging.getLogger("normexp").propagate = False
    warnings.simplefilter("ignore")
    some_wrong = False
    for case in cases:
        if arguments.names and not any(part in case.name for part in arguments.names):
            continue
        verdict = check(case)
        print(f"{case.name}: {verdict}", flush=True)
        some_wrong |= bool(verdict.wrong)
    return int(some_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
