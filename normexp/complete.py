"""Completion in bash: after `eval "$(python -m normexp.complete)"`, norm=ba<TAB> is norm=batch.

Each <TAB> asks `python -m normexp.complete LINE`, which imports neither torch nor Hydra.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from normexp.cli import entry
from normexp.config.help import CUSTOM_GROUPS, GROUPS, USAGE, choice_files, conf_dir, group_choices
from normexp.config.rules import FLAG, KEYS, OPTIONS

# By default bash also splits words at `=`, and completes only what follows, $2.
BASH = r"""
_normexp() {
  local line=${COMP_LINE:0:COMP_POINT} IFS=$'\n'
  local word=${line##* }
  [[ $line =~ (normexp[.-]|scripts/)(ENTRIES)\  ]] || return
  COMPREPLY=($("PYTHON" -m normexp.complete "$line" 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"${word%"$2"}"}")
}
complete -o default -o nospace -F _normexp python python3 ./scripts/train COMMANDS
"""
LINE = re.compile(rf"(?:normexp[.-]|scripts/)({'|'.join(USAGE)})\s+(.*)$", re.DOTALL)


def complete(line: str) -> list[str]:
    """The completions of a command line's last word; the values of a list one by one."""
    match = LINE.search(line)
    if match is None:
        return []
    command, words = match[1], re.split(r"\s+", match[2])
    *before, word = words
    key, equals, text = word.partition("=")
    if not equals:
        keys = _keys(command, before, is_deep="." in word)
        return [f"{name}=" for name in keys if name.startswith(word)]
    last = re.split(r"[\[,]", text)[-1]
    earlier = text.removesuffix(last)
    given = re.split(r"[\[,]", earlier)
    values = [name for name in _values(command, key, before) if name not in given]
    return [f"{key}={earlier}{name}" for name in values if name.startswith(last)]


def _keys(entry: str, before: Sequence[str], *, is_deep: bool) -> Iterable[str]:
    """The keys that an entry takes and the line lacks; with `is_deep`, the knobs of groups too."""
    if entry in ("train", "tune"):
        top_level = (
            key for key in KEYS if "." not in key or entry == "tune" and key[:5] == "tune."
        )
        known, groups = {*GROUPS, *top_level}, (*CUSTOM_GROUPS, "trainer")
    elif entry == "check":
        known, groups = {"norm", "eps", *OPTIONS[entry]}, ("norm",)
    else:
        known, groups = {*OPTIONS[entry]}, ()
    for group in groups if is_deep else ():
        known |= {f"{group}.{knob}" for knob in _knobs(group, before)}
    return sorted(known - {word.partition("=")[0] for word in before})


def _values(entry: str, key: str, before: Sequence[str]) -> Sequence[str]:
    if key in GROUPS and entry not in OPTIONS.keys() - {"check"}:
        return group_choices(key, _after(before, "--config-dir"))
    if key == "study":
        runs_dir = Path([*_after(before, "runs_dir"), "runs"][0])
        return sorted(path.parent.name for path in runs_dir.glob("*/study.jsonl"))
    rules = {name: known.rule for name, known in KEYS.items()} | OPTIONS.get(entry, {})
    if key in rules:
        return rules[key].choices
    group, _, knob = key.partition(".")
    is_flag = isinstance(_knobs(group, before).get(knob), bool)
    return FLAG.choices if is_flag else ()


def _knobs(group: str, before: Sequence[str]) -> dict[str, Any]:
    """The knobs of the choice of a group, with their defaults."""
    config = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    groups = [entry for entry in config["defaults"] if isinstance(entry, dict)]
    defaults = [entry[group] for entry in groups if group in entry]
    chosen = [*_after(before, group), *defaults, None][0]
    path = choice_files(group, _after(before, "--config-dir")).get(chosen)
    tree = path and yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    knobs = tree.get("data", {}) if group == "data" else tree
    return {name: value for name, value in knobs.items() if not name.startswith("_")}


def _after(words: Sequence[str], name: str) -> list[str]:
    """The values of `name=value` and of `name value`."""
    pairs = zip(words, words[1:], strict=False)
    values = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return values + [value for word, value in pairs if word == name]


@entry("complete")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 if the reader of the output has gone."""
    if words:
        is_help = words[0] in ("--help", "-h")
        print(__doc__ if is_help else "\n".join(complete(words[0])))
        return 0
    commands = " ".join(f"normexp-{name}" for name in USAGE)
    script = BASH.replace("ENTRIES", "|".join(USAGE)).replace("COMMANDS", commands)
    print(script.replace("PYTHON", sys.executable))
    return 0


if __name__ == "__main__":
    sys.exit(main())
