"""The canonical content of a composed config, which the id of a cell hashes, and that id.

Computed from the config and the user's own source, without torch. Leaves out shipped keys at their
defaults and names a shipped class by its choice, so that a new key or a moved class does not change
recorded ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from normexp.training.config.compose import FORMER_DEFAULTS, short_name
from normexp.training.config.groups import (
    OPTIONAL_GROUPS,
    PARTS,
    parts_with_target,
    shipped_config,
    shipped_defaults,
    shipped_targets,
    shipped_values,
    ships,
)
from normexp.training.config.keys import KEYS, Settings, in_identity
from normexp.training.records.source import digest_of, package_digest, source_digest, source_files
from normexp.verdicts.settings import SIZES
from normexp.words import as_typed

# Versions of choices, raised when a default or the meaning of a choice changes: {"norm/group": 2}.
# Versions are hashed, so that trainings before and after the change are different cells.
VERSIONS: dict[str, int] = {
    "norm/progressive_rep_batch": 2,  # the fade begins with the first step
    "model/torchvision": 2,  # sites keep the eps and momentum of the norms that they replace
    # 2: warm-ups and ramps are shares of the training; they were steps
    **dict.fromkeys(("norm/batch_renorm", "norm/moving_average_batch", "norm/power"), 2),
}

# Ids and records name the schedule among the values of `optim`, where it once stood. These are its
# defaults, which ids leave out; a schedule of the user's own keeps them beside its own name.
OPTIM_SCHEDULE = {"schedule": "cosine", "warmup": 0.1}

# Of texts that other packages hold; recorded ids contain them. Loaded data are compared besides.
TEXT_DIGESTS = {
    "normexp.training.data.text.load_manual": "71f2ff5d99bdc1f9",
    "normexp.training.data.langid.load_langid": "135064382cc0a164",
}


def identity_of(
    config: Mapping[str, Any], choices: Mapping[str, str], settings: Settings
) -> dict[str, Any]:
    """Everything in a config that defines a training except its seed, in canonical form.

    Values that differ from the shipped defaults, with numbers by value, and `lr` always. The sizes
    are those of one device (`sizes_of`). A group is its choice with other values than its YAML's
    (`_content_of`); a class of the user's own comes with a digest of its source. Whether a key
    counts, and a value of it that counts as absent, is said in keys.py.

    Args:
        config: composed and resolved, as plain values.
        choices: the choice in each config group, as `compose_cell` returns them.
        settings: the typed values of the config.
    """
    values = deepcopy(defining_values(config))
    for part in parts_with_target(values):
        if digest := TEXT_DIGESTS.get(part["_target_"]):
            part["text_digest"] = digest
    for part in own_parts(values, choices):
        if digest := source_digest(part["_target_"]):
            part["source_digest"] = digest
    groups = {}
    for name in (*PARTS, *OPTIONAL_GROUPS):
        if isinstance(values.get(name), dict):
            groups[name] = values.pop(name)
    defaults = defining_values(shipped_config() | {"trainer": shipped_defaults("trainer", "auto")})
    sizes = sizes_of(config, settings)
    content = differences(defaults | values | sizes, defaults)
    content["lr"] = config["lr"]  # also where it is the default, which follows from the optimizer

    norm, mixes_samples = groups["norm"], settings.norm.may_mix_samples
    num_devices = settings.trainer.num_processes
    may_be_shared = num_devices > 1 and declared_synchronized(config["norm"]) is None
    has_groups = may_be_shared or sizes["micro_batch_size"] or sizes["norm_batch_size"]
    if not (has_groups and mixes_samples):
        norm.pop("running_from", None)
    if norm.get("at"):
        norm["at"] = as_typed(norm["at"])  # one value in tables
    if may_be_shared and mixes_samples:
        content["devices"] = num_devices

    for group, values_of_group in groups.items():
        content[group] = _content_of(group, choices.get(group, "custom"), values_of_group)
    sees_validations = "callback" in content or "choice" not in content["schedule"]
    if sees_validations and config["val_every_epochs"] != 1:
        content["val_every_epochs"] = config["val_every_epochs"]
    _name_in_optim(content, config)
    return content


def _name_in_optim(content: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Moves a shipped schedule of an identity, and its warm-up, to the values of its optimizer."""
    named, schedule = dict(OPTIM_SCHEDULE), content.pop("schedule")
    if "choice" in schedule:
        found = {"schedule": schedule["choice"], **config["schedule"]}
        named = {key: found.get(key, default) for key, default in named.items()}
        schedule = {key: schedule[key] for key in schedule.keys() - {"choice", "warmup"}}
    if schedule:
        content["schedule"] = schedule
    is_shipped_optim = "choice" in content["optim"]
    content["optim"] |= differences(named, OPTIM_SCHEDULE) if is_shipped_optim else named


def id_of(
    config: Mapping[str, Any], choices: Mapping[str, str], identity: Mapping[str, Any]
) -> str:
    """The id of a cell: norm, model, data, sizes and rate, and a hash of its identity."""
    sizes = {key: identity.get(key, shipped_config()[key]) for key in SIZES}
    names = [_label(group, choices, config) for group in PARTS[:3]]
    shown = [f"{key[0]}{value}" for key, value in sizes.items() if value]  # b32, m8, n4
    lr = config["lr"]
    shown.append(f"lr{lr:.6g}" if isinstance(lr, int | float) else f"lr{lr}")
    return cell_id(identity, [*names, *shown])


def sizes_of(config: Mapping[str, Any], settings: Settings) -> dict[str, int | None]:
    """The three sizes with which one device trains like those of the config, in canonical form.

    A device's share of a forward pass is a ghost sub-batch, unless the norm spans devices.
    """
    sizes, num_devices = settings.sizes, settings.trainer.num_processes
    if num_devices > 1 and (spans := declared_synchronized(config["norm"])) is not None:
        sizes = sizes.shared_by(num_devices, synchronized=spans)
    return sizes.canonical(mixes_samples=settings.norm.may_mix_samples)


def declared_synchronized(norm: Mapping[str, Any]) -> bool | None:
    """Whether a norm takes its statistics over all devices, as its YAML says (`synchronized`).

    None for a foreign norm whose values do not say.
    """
    if norm.get("synchronized") is not None:
        return bool(norm["synchronized"])
    shipped = shipped_values("norm", norm["_target_"])
    return None if shipped is None else bool(shipped.get("synchronized"))


def defining_values(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config, or of its group at `prefix`, that define the training."""
    defining = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        is_implied = key in KEYS and KEYS[key].implied == value
        if not in_identity(key) or is_implied:
            continue
        is_group = isinstance(value, Mapping) and not prefix
        defining[name] = defining_values(value, f"{key}.") if is_group else value
    return defining


def own_parts(values: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The parts of a config whose classes no shipped choice names."""
    for group in (*PARTS, *OPTIONAL_GROUPS):
        for part in parts_with_target(values.get(group)):
            if not ships(group, choices.get(group), part["_target_"]):
                yield part


def sources_of(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """The digest of each of the user's own source files that the identity counts, by path."""
    digests: dict[str, str] = {}
    for part in own_parts(defining_values(config), choices):
        for path in source_files(part["_target_"]).values():
            digests[str(path)] = digest_of(path.read_bytes())
    return digests


def packages_of(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """The digest of the installed package that each part comes from, by group.

    Shipped classes have none, and neither have data, whose contents have a digest.
    """
    digests = {}
    for group in (*PARTS, *OPTIONAL_GROUPS):
        if group == "data":
            continue
        targets = {part["_target_"] for part in own_parts({group: config.get(group)}, choices)}
        if targets:
            targets -= shipped_targets(group).keys()
        found = {digest for target in targets if (digest := package_digest(target))}
        if found:
            digests[group] = " ".join(sorted(found))
    return digests


def _content_of(group: str, choice: str, values: dict[str, Any]) -> dict[str, Any]:
    """The hashed content of a group: a shipped choice by name, a user's own in full."""
    if "_target_" not in values:  # several callbacks, by name
        return values
    defaults = shipped_defaults(group, choice)
    if defaults is None:
        target = str(values["_target_"])
        name = shipped_targets(group).get(target, target)
        content = values | {"_target_": name}
    else:
        name = f"{group}/{choice}"
        former = {
            key: FORMER_DEFAULTS.get(f"{group}.{key}", value) for key, value in defaults.items()
        }
        content = {"choice": choice, **differences(values, defining_values(former, f"{group}."))}
    if version := VERSIONS.get(name):
        content["version"] = version
    return content


def _label(group: str, choices: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """A part's name in ids: its knob `name`, as torchvision's resnet50, or its choice.

    A user's own part has the name of its class, whichever YAML names it, so that it has one id.
    """
    choice, values = choices.get(group, "custom"), config.get(group) or {}
    if isinstance(values.get("name"), str):
        return values["name"]
    if shipped_defaults(group, choice) is None:
        return short_name(str(values.get("_target_", "custom")))
    return choice.rpartition("/")[2]


# --- Canonical values, and the id as text ---------------------------------------------------------

MAX_LENGTH = 80  # characters of a cell id: readable in a listing, short enough for any file system
HASH_DIGITS = 10
NAME_LENGTH = 16


def differences(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` that differ from `defaults`, in nested dicts; `~key: None` for a removed key.

    Numbers are compared by value (1 is 1.0), and a list as a whole.
    """
    differing: dict[str, Any] = {f"~{key}": None for key in defaults if key not in values}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := differences(value, default):
                differing[key] = inner
        elif key not in defaults or _plain(value) != _plain(default):
            differing[key] = value
    return differing


def cell_id(content: Mapping[str, Any], slug: Sequence[str]) -> str:
    """`group-convnet-digits-b32-m8-n4-lr0.1-0123456789`: a slug and a hash of `content`.

    The hash is of JSON with sorted keys and numbers by value (0.10 is 0.1, 1.0 is 1). Lower case,
    safe as a file name, at most 80 characters.
    """
    text = json.dumps(_plain(content), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    name = "-".join(map(_safe, slug))[: MAX_LENGTH - HASH_DIGITS - 1].rstrip("-._")
    return f"{name}-{digest}" if name else digest


def _plain(value: Any) -> Any:
    """Dicts with string keys, lists, and numbers of 15 digits: one value has one JSON text.

    The sixteenth digit of a derived number, such as a momentum, may differ between machines.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        value = float(f"{value:.15g}")
        return int(value) if value.is_integer() else value
    return value


def _safe(name: str) -> str:
    safe = re.sub(r"[^a-z0-9_.]+", "_", name.lower())[:NAME_LENGTH].strip("_.")
    return safe or "custom"
