"""What messages are made of: one line of any error, lists of names."""

from __future__ import annotations

import pytest

from normexp.errors import UserError, one_line
from normexp.words import as_python, as_typed, name_some, suggest

ERRORS = {
    "b=3: too many; try b=2": UserError("b=3: too many; try b=2"),
    "KeyError: 'depth'": KeyError("depth"),
    "RuntimeError: first": RuntimeError("\nfirst\nsecond"),
    "ValueError": ValueError(),
}


@pytest.mark.parametrize(("line", "error"), ERRORS.items(), ids=ERRORS.keys())
def test_an_error_is_told_in_one_line(line: str, error: Exception):
    assert one_line(error) == line
    with pytest.raises(type(error)) as caught:
        raise error  # in a file that is the user's, as far as normexp knows
    is_told = isinstance(error, UserError)
    assert one_line(caught.value).startswith(line if is_told else f"{line} (test_words.py, line ")


def test_a_class_or_function_is_named_as_it_is_typed():
    assert as_typed(UserError) == "normexp.errors.UserError"
    assert as_typed([one_line]) == "[normexp.errors.one_line]"


def test_many_names_are_shortened():
    assert name_some("aab") == "a, b"
    assert name_some("abcdee") == "a, b, c and 2 more"
    assert suggest("norn", ["norm", "mode"]) == "did you mean norm?"
    assert suggest("norn", ["seed"]) == ""


@pytest.mark.parametrize(
    ("message", "own", "python"),
    [
        ("study=mine not found; did you mean it?", "", 'study="mine" not found; did you mean it?'),
        ("a=null, b=[2,x] or c=[]; set d=...", "", 'a=None, b=[2, "x"] or c=[]; set d=...'),
        ('a=[true, "b,c",d] and e', "", 'a=[True, "b,c", "d"] and e'),
        ("norm=a,b: add -m, or x=false", "", 'norm="a,b": add -m, or x=False'),
        ("try norm.eps=2", "", 'try "norm.eps=2"'),
        ("try norm.eps=2 at bn.norm", "norm", "try eps=2 at bn.norm"),
        ("norm._target_=my.Norm: no module", "norm", 'norm="my.Norm": no module'),
        ("f(x, y=True), as before", "", "f(x, y=True), as before"),
        ("--help lists all", "", "python -m normexp.train --help lists all"),
    ],
)
def test_a_remedy_for_a_shell_is_told_in_python(message: str, own: str, python: str):
    assert as_python(message, own=own) == python
    assert as_python(python, own=own) == python
