"""What a `_target_` of a config names: a class or function with its knobs, checked and called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from normexp.config.compose import dotted_keys
from normexp.config.words import one_line, suggest
from normexp.errors import UserError
from normexp.records.sources import source_line_of, why_missing

logging.getLogger("hydra").addHandler(logging.NullHandler())  # Hydra also logs what it raises

REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args, **kwargs
Made = TypeVar("Made")


@dataclass(frozen=True)
class Target:
    """A class or function that the config names, with its knobs.

    Attributes:
        key: where the config names it, such as `data` or `logger.custom`.
        path: its dotted path.
        call: the class or function, or a partial of it with its knobs.
    """

    key: str
    path: str
    call: Callable[..., Any]

    @property
    def name(self) -> str:
        return f"{self.key}._target_={self.path}"

    @property
    def unwrapped(self) -> Any:
        """The class or function itself, without knobs."""
        call = self.call
        while isinstance(call, partial):  # nested: Hydra's partial does not merge with ours
            call = call.func
        return call

    @property
    def arguments(self) -> set[str]:
        """The names of its arguments; `**` if it takes any other."""
        try:
            parameters = inspect.signature(self.unwrapped).parameters
            return {"**" if p.kind is p.VAR_KEYWORD else name for name, p in parameters.items()}
        except (TypeError, ValueError):  # not callable, or written in C
            return set()

    @property
    def knobs(self) -> Mapping[str, Any]:
        call, knobs = self.call, {}
        while isinstance(call, partial):
            call, knobs = call.func, {**call.keywords, **knobs}
        return knobs

    def filled_in(self, available: Mapping[str, Any]) -> Target:
        """A copy with every `available` argument that its signature has and no knob sets."""
        free = self.arguments - self.knobs.keys()
        wanted = {name: value for name, value in available.items() if name in free}
        return replace(self, call=partial(self.call, **wanted)) if wanted else self

    def require(self, num_given: int, *given: str) -> None:
        """Raises UserError for an argument that neither a knob nor the caller sets.

        Args:
            num_given: how many arguments the caller passes by position.
            given: the names of those that it passes by keyword.
        """
        try:
            free = inspect.signature(self.call).parameters.values()
        except (TypeError, ValueError):  # not callable, or written in C
            return
        names = [p.name for p in free if p.default is p.empty and p.kind not in REST]
        for name in names[num_given:]:
            if name not in given:
                key = f"{self.key}.{name}"
                raise UserError(f"{key} is missing: {self.path} needs it; set {key}=...")

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
            raise UserError(f"{self.name} returned a {type(made).__name__}, not a {wanted}")
        return made

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Turns an error of the target's code into a UserError with the line of the user's file."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # user code may raise anything
            reason = f"{one_line(error)}{source_line_of(error)}"
            raise UserError(f"{self.name} fails: {reason}") from error


def read_target(values: Mapping[str, Any], key: str) -> Target:
    """What `_target_` names, with its knobs.

    Raises:
        UserError: a missing value, or a knob that the target does not take.
    """
    refuse_missing_values(values, f"{key}.")
    target = _find_target(values, key)
    names = target.arguments
    unknown = [] if not names or "**" in names else sorted(target.knobs.keys() - names)
    if unknown:
        hint = suggest(unknown[0], names) or f"it takes {', '.join(sorted(names)) or 'nothing'}"
        raise UserError(f"{key}.{unknown[0]}: {target.path} has no such argument; {hint}")
    return target


def _find_target(values: Mapping[str, Any], key: str) -> Target:
    """The target with its knobs, unchecked. Raises UserError if it is not found."""
    try:
        call = instantiate({**values, "_partial_": True}, _convert_="all")
        return Target(key, values["_target_"], call)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, ImportError):
            raise UserError(_explain_import(values["_target_"], key, cause)) from error
        reason = str(cause or error).strip() or type(cause).__name__
        first, *rest = reason.splitlines()
        message = " ".join([first, *rest[:1]]) if first.endswith(":") else first
        raise UserError(f"{key}._target_={values['_target_']}: {message}") from error


def _explain_import(target: str, key: str, error: ImportError) -> str:
    """Explains in one line why Hydra could not import a target."""
    cause = error.__cause__ or error
    first = (str(cause).splitlines() or [""])[0]
    reason = why_missing(target) or f"importing it fails with {type(cause).__name__}: {first}"
    return f"{key}._target_={target}: {reason}"
