"""The table of questions. A card, the contract and the preflight of a network are selections of it.

A new question is one row.
"""

from __future__ import annotations

import operator
from functools import partial

from normexp.checks import agreement, behaviour, dependence, foreign, integrity
from normexp.checks.asking import Question
from normexp.checks.lone_norm import LoneNorm, Shape
from normexp.checks.probe import MODES
from normexp.norms.adapt import PROBED_DIMS


def every(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes)


def smallest(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes[:1])


def largest(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes[-1:])


contract = partial(Question, follows="contract")
trait = partial(Question, follows="traits")
moves = partial(trait, says="moves")  # the modes in which something moves
same = partial(trait, says="same")  # the modes in which nothing moves
works = partial(Question, follows="compatibility")
of_network = partial(Question, follows="trait")  # a field of `Traits`
refuses = partial(Question, follows="refusal")
warns = partial(Question, follows="warning")

BY_SCALE = tuple(partial(operator.mul, factor) for factor in dependence.SCALES)
BY_SHIFT = tuple(partial(operator.add, by) for by in dependence.SHIFTS)
# Scaling all channels alike is a special case.
BY_CHANNEL = (dependence.scaled_by_channel, *BY_SCALE)
FINITE_ON = {
    "finite on constants": lambda x: 0 * x + agreement.CONSTANT,
    "finite at scale 1e-12": lambda x: 1e-12 * x,
    "finite at scale 1e12": lambda x: 1e12 * x,
}

# Asked first of a norm by itself: which inputs does it take?
INPUTS = (
    contract("an input is taken", behaviour.takes_an_input),
    *(contract(f"{n}-D inputs", partial(behaviour.takes_dims, n)) for n in PROBED_DIMS),
    contract("finite outputs", behaviour.finite, shapes=every, modes=MODES),
)
OF_NORMS = (
    contract("dtype kept", behaviour.keeps_dtype),
    contract("any strides", behaviour.takes_any_strides, shapes=every, modes=MODES),
    contract("input unchanged", behaviour.leaves_input_alone, shapes=every, modes=MODES),
    contract("parameters made at once", behaviour.makes_parameters_at_once),
    contract("gradient for every parameter", behaviour.reaches_parameters, shapes=largest),
    contract("no graph kept", behaviour.holds_no_graph, shapes=smallest),
    contract("buffers keep shape and dtype", behaviour.keeps_buffers, shapes=every, modes=MODES),
    contract("state_dict round trip", integrity.unsaved_state, shapes=every),
    contract("deterministic in evaluation", behaviour.is_deterministic, shapes=every),
    contract("evaluation changes no state", behaviour.keeps_state_in_evaluation, shapes=smallest),
    contract("running averages", behaviour.averages_as_torch, shapes=largest),
    contract("evaluation by averages", behaviour.evaluates_by_averages, shapes=every),
    contract("statistics wide in bfloat16", agreement.keeps_digits_in_half, shapes=every),
    contract("gradient in training", agreement.gradient_is_right, shapes=every, modes=(True,)),
    contract("gradient in evaluation", agreement.gradient_is_right, shapes=every, modes=(False,)),
    contract("exact at mean 1e4", agreement.keeps_digits_far_from_zero, shapes=every),
    *(
        contract(name, partial(agreement.is_finite_on, transform), shapes=every, modes=MODES)
        for name, transform in FINITE_ON.items()
    ),
    *(
        contract(name, agreement.handles_few_values, shapes=shapes, modes=MODES)
        for name, shapes in (
            ("one sample", agreement.one_sample),
            ("one position", agreement.one_position),
            ("empty batch", agreement.no_sample),
        )
    ),
    contract("no argument swallowed", behaviour.uses_arguments),
    moves("mixes samples", dependence.mixes_samples, shapes=dependence.with_many_samples),
    moves("pools channels", dependence.pools_channels, shapes=every),
    moves("pools positions", dependence.pools_positions, shapes=dependence.with_positions),
    moves("leaks the future", dependence.leaks_future, shapes=dependence.texts),
    moves("reads padding", dependence.reads_masked, shapes=dependence.padded_text),
    trait("channels_last kept", behaviour.keeps_channels_last, shapes=behaviour.own_maps),
    trait(
        "instance norm at one sample",
        dependence.equals_instance_norm,
        shapes=dependence.most_positions,
    ),
    trait("running state", dependence.has_running_state, shapes=largest),
    *(
        same(f"ignores {what}", partial(dependence.changes_output, changes), shapes=every)
        for what, changes in (
            ("input scale", BY_SCALE),
            ("input shift", BY_SHIFT),
            ("channel scales", BY_CHANNEL),
        )
    ),
    same(
        "ignores scale of weights", dependence.changes_with_weights, shapes=dependence.behind_layer
    ),
    trait("effect of eps x10, std 0.001", dependence.effect_of_eps, shapes=largest),
    *(
        trait(f"{name}, batch of {n}", ask, shapes=partial(dependence.batch_of, n))
        for name, ask in (
            ("output size", dependence.output_size),
            ("train/eval gap", dependence.gap_between_modes),
        )
        for n in dependence.BATCHES
    ),
    works("torch.compile in training", agreement.compiles, shapes=largest, modes=(True,)),
    works("torch.compile in evaluation", agreement.compiles, shapes=largest, modes=(False,)),
    works("replicas under vmap", agreement.stacks, shapes=every),
    works("ghost = accumulated", agreement.splits, shapes=agreement.batch_to_split),
    works("state of a split step", agreement.state_of_split, shapes=agreement.batch_to_split),
    works("float64", behaviour.computes_in_float64),
    works("autocast to bfloat16", agreement.takes_autocast, shapes=every),
    Question("bytes kept for backward", agreement.bytes_kept, "cost"),
)
# Of a network before its training, in this order: the first refusal ends it.
OF_NETWORKS = (
    of_network("elements_per_sample", operator.attrgetter("elements_per_sample")),
    refuses("a norm site", integrity.lacks_sites),
    refuses("effect of any norm", integrity.no_site_matters),
    warns("effect of every norm", integrity.idle_sites),
    warns("gradient for every parameter", integrity.untrained_parameters),
    warns("every norm at a site", integrity.other_norms),
    warns("parameters of each site", integrity.shared_modules),
    refuses("mergeable state", integrity.splits_sequential_state),
    warns("one use in a forward", integrity.state_of_several_uses),
    of_network("reaches", dependence.reaches_of),
    refuses("statistics over one value", dependence.statistics_over_one_value),
    warns("statistics over few values", dependence.statistics_over_few_values),
    refuses("outputs depend on inputs", integrity.every_output_is_the_same),
    refuses("reads padding", dependence.padding_is_read),
    Question("float64", foreign.runs_in_float32_alone, "note", only_foreign=True),
    refuses("equal copies", foreign.copies_differ, only_foreign=True),
    refuses("parameters of the network", foreign.parameters_outside, only_foreign=True),
    warns("trained parameters", foreign.freezes_parameters, only_foreign=True),
    refuses("input unchanged", foreign.input_written, only_foreign=True),
    refuses("gradient of the input", foreign.input_gradient_is_missing, only_foreign=True),
    warns("slope of the input", foreign.input_gradient_is_wrong, only_foreign=True),
    warns("global random states", foreign.seeds_draws, only_foreign=True),
    refuses("state_dict round trip", integrity.state_that_checkpoints_lack),
    refuses("deterministic in evaluation", integrity.draws_in_evaluation),
    of_network("leak", dependence.leak),
    of_network("leaks_future_in_training", dependence.future_leaks_in_training),
    refuses("leaks the future in evaluation", dependence.future_leaks_in_evaluation),
    Question("leaks the future in training", dependence.future_leaks_in_training_alone, "note"),
    of_network("draws_for_itself", integrity.draws_for_itself),
    of_network("mixes_samples", dependence.samples_mix),
    of_network("mixes_samples_in_evaluation", dependence.samples_mix_in_evaluation),
    warns("mixes samples outside norms", dependence.samples_mix_outside_norms),
    refuses("first axis of sub-batches", dependence.other_first_axis),
    of_network("stacking_obstacle", integrity.stacking_obstacle),
)
QUESTIONS = INPUTS + OF_NORMS + OF_NETWORKS
CONTRACT = tuple(question for question in QUESTIONS if question.follows == "contract")
