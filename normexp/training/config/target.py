"""What a `_target_` of a config names: a class or function with its knobs, checked and called."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from normexp.errors import UserError, one_line
from normexp.training.config.compose import refuse_missing_values
from normexp.training.config.validate import check_value
from normexp.training.records.source import why_missing
from normexp.words import name_some, suggest

log = logging.getLogger(__name__)
logging.getLogger("hydra").addHandler(logging.NullHandler())  # Hydra also logs what it raises

Made = TypeVar("Made")
NUMBERS = {int, float}
PLAIN = (*NUMBERS, bool, str, NoneType)


@dataclass(frozen=True)
class Target:
    """A class or function that the config names, with its knobs.

    Attributes:
        key: where the config names it, such as `data` or `logger.custom`.
        path: its dotted path.
        call: a partial of the class or function (`call.func`) with its knobs (`call.keywords`).
    """

    key: str
    path: str
    call: partial[Any]

    @property
    def name(self) -> str:
        return f"{self.key}._target_={self.path}"

    @property
    def arguments(self) -> set[str]:
        """The names of its arguments; `**` if it takes any other."""
        names = _parameters(self.call.func)
        return {"**" if p.kind is p.VAR_KEYWORD else name for name, p in names.items()}

    def with_knobs(self, knobs: Mapping[str, Any]) -> Target:
        """A copy with other values for these arguments."""
        return replace(self, call=partial(self.call, **knobs)) if knobs else self

    def filled_in(self, available: Mapping[str, Any]) -> Target:
        """A copy with every `available` argument that its signature has and no knob sets."""
        free = self.arguments - self.call.keywords.keys()
        return self.with_knobs({name: available[name] for name in available.keys() & free})

    def require(self, num_given: int, *given: str) -> None:
        """Raises UserError for an argument that neither a knob nor the caller sets.

        Args:
            num_given: how many arguments the caller passes by position.
            given: the names of those that it passes by keyword.
        """
        needed = []
        for name, parameter in _parameters(self.call).items():
            takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and not takes_any:
                needed.append(name)
        for name in needed[num_given:]:
            if name not in given:
                raise UserError(f"{self.path} needs {name}; set {self.key}.{name}=...")

    def make(self, kind: type[Made], *given: Any) -> Made:
        """Calls the target. Raises UserError if it fails, or returns no instance of `kind`.

        Args:
            given: arguments by position.
        """
        self.require(len(given))
        with self.explaining_errors():
            made = self.call(*given)
        if not isinstance(made, kind):
            wanted = f"{kind.__module__}.{kind.__name__}"
            remedy = "conf/README.md leads to an example"
            raise UserError(
                f"{self.name} returned a {type(made).__name__}, not a {wanted}; {remedy}"
            )
        return made

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Turns an error of the target's code into a UserError with the line of the user's file."""
        try:
            with _keeping_process(self.path):
                yield
        except UserError:
            raise
        except Exception as error:  # user code may raise anything
            raise UserError(f"{self.name} fails: {one_line(error)}") from error


@contextmanager
def _keeping_process(path: str) -> Iterator[None]:
    """Puts back what a user's code changes of the whole process, and logs it.

    That is the current folder, in which relative paths lie, and torch's default dtype, in which all
    networks are built.
    """
    folder, dtype = _current_folder(), _default_dtype()
    try:
        yield
    finally:
        if folder and folder != (other := _current_folder()):
            os.chdir(folder)
            log.warning(
                "%s changes the current folder to %s; paths stay in %s", path, other, folder
            )
        if dtype != (other := _default_dtype()):
            sys.modules["torch"].set_default_dtype(getattr(sys.modules["torch"], dtype))
            log.warning(
                "%s sets torch's default dtype to %s; training stays in %s", path, other, dtype
            )


def _current_folder() -> str:
    """Empty if it has been removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def _default_dtype() -> str:
    """The name of torch's default dtype; where torch is not imported yet, what it will be."""
    torch = sys.modules.get("torch")
    return str(torch.get_default_dtype()).removeprefix("torch.") if torch else "float32"


def locate(path: str) -> Any:
    """The class or function at a dotted path. Raises what importing it raises."""
    with _keeping_process(path):
        return get_object(path)


def read_target(values: Mapping[str, Any], key: str) -> Target:
    """What `_target_` names, with its knobs.

    Raises:
        UserError: a missing value, or a knob that the target does not take.
    """
    if not isinstance(values, Mapping) or "_target_" not in values:
        raise UserError(f"{key}._target_ is missing; it names a class, as my_package.MyClass")
    refuse_missing_values(values, f"{key}.")
    parts = _parts_of(values, key)
    try:
        with _keeping_process(values["_target_"]):
            for name, part in parts.items():
                _check_part(part, name)
            call = instantiate({**values, "_partial_": True}, _convert_="all")  # makes its parts
    except InstantiationException as error:
        for name, part in parts.items():
            read_target(part, name)  # a mistake in it is named by its own key
        raise _explain(error, values["_target_"], key) from error
    target = Target(key, values["_target_"], partial(call.func, *call.args, **call.keywords))
    _check_knobs(target)
    names = target.arguments
    unknown = [] if not names or "**" in names else sorted(target.call.keywords.keys() - names)
    if unknown:
        hint = suggest(unknown[0], names) or f"it takes {name_some(sorted(names))}"
        raise UserError(f"{key}.{unknown[0]}: {target.path} has no such argument; {hint}")
    return target


def _parts_of(values: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """The knobs that are targets themselves, by their keys."""
    return {
        f"{key}.{name}": value
        for name, value in values.items()
        if isinstance(value, Mapping) and "_target_" in value
    }


def _check_part(values: Mapping[str, Any], key: str) -> None:
    """Checks the kinds of the knobs of a target within another one, without making it."""
    for name, part in _parts_of(values, key).items():
        _check_part(part, name)
    try:
        knobs = {name: value for name, value in values.items() if not name.startswith("_")}
        call = partial(locate(values["_target_"]), **knobs)
    except Exception:  # making it says what is wrong
        return
    _check_knobs(Target(key, values["_target_"], call))


def _check_knobs(target: Target) -> None:
    """Raises UserError for a value that a plain type of the signature refuses, as a text for int.

    A number may be of another type than the signature says.
    """
    made = target.call.func
    try:
        kinds = get_type_hints(made.__init__ if isinstance(made, type) else made)
    except Exception:  # of foreign code, any kind
        return
    is_own = target.path.startswith("normexp.")
    defaults = {name: parameter.default for name, parameter in _parameters(made).items()}
    for name, value in target.call.keywords.items():
        kind = kinds.get(name)
        types = get_args(kind) or (kind,)
        if not all(type_ in PLAIN for type_ in types):
            continue
        if type(value) in PLAIN and value == defaults.get(name):
            continue
        if not is_own and _may_be_careless(value, types):
            continue
        is_number = type(value) in NUMBERS and not NUMBERS.isdisjoint(types)
        is_union = get_origin(kind) in (None, Union, UnionType)
        is_in_container = isinstance(value, list | dict) and not is_union
        if not is_number and not is_in_container:
            check_value(f"{target.key}.{name}", value, kind)


def _may_be_careless(value: Any, types: tuple[Any, ...]) -> bool:
    """True for what a foreign signature may mean as well: `int` for a pair, null, 0 for false."""
    if value is None or isinstance(value, list | dict):
        return True
    numeric = {*NUMBERS, bool}
    return type(value) in numeric and not numeric.isdisjoint(types)


def _parameters(call: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # not callable, or written in C
        return {}


def _explain(error: InstantiationException, path: str, key: str) -> UserError:
    """What is wrong with a target, or with one below it, in one line."""
    cause = error.__cause__ or error
    if isinstance(cause, UserError):
        return cause
    reason = one_line(cause)
    if "Expected a callable target" in reason:
        reason = "it is no class or function"
    if located := re.search(r"Error locating target '([^']+)'", str(error)):
        path = located[1]
        module, _, name = path.rpartition(".")
        try:
            names = dir(import_module(module))
            reason = f"{module} has no {name}; {suggest(name, names) or 'name another'}"
        except Exception as failed:  # user code may raise anything
            reason = why_missing(path) or f"importing it fails with {one_line(failed)}"
    return UserError(f"{key}._target_={path}: {reason}")
