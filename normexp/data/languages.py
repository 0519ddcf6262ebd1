"""The strings of `data=langid`: CLDR names inside Babel. Imports no torch, since ids hash them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from normexp.errors import UserError


def read_own_strings(languages: list[str], max_length: int) -> dict[str, list[str]]:
    """For each language, the sorted strings that occur in no other language."""
    strings = {language: set(_read_names(language, max_length)) - {""} for language in languages}
    if len(strings) < 2:
        raise UserError(f"data.languages={list(languages)} must name two languages or more")
    num_languages = Counter(text for names in strings.values() for text in names)
    return {
        language: sorted(text for text in names if num_languages[text] == 1)
        for language, names in strings.items()
    }


def _read_names(language: str, max_length: int) -> Iterator[str]:
    from babel import Locale, UnknownLocaleError

    try:
        locale = Locale.parse(language)
    except (UnknownLocaleError, ValueError) as error:
        raise UserError(
            f"data.languages has {language!r}, which Babel does not know; try a code such as de"
        ) from error
    for kind in ("territories", "languages", "scripts", "variants", "currencies"):
        for name in getattr(locale, kind).values():
            yield str(name)[:max_length].strip()
    for forms in locale.unit_display_names.values():
        if "long" in forms:
            yield str(forms["long"])[:max_length].strip()
