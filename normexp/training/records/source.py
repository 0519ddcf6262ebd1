"""The user's own source behind a target, found in syntax trees without importing anything.

The file of the target, and all of the user's own files that it imports, with the `__init__` of
their packages. Files of normexp, of the standard library and in site-packages are not the user's.
An installed package counts as a whole.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import symtable
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from normexp.errors import PACKAGE, UserError, is_installed, is_own
from normexp.words import name_some, suggest


def source_files(target: str) -> dict[str, Path]:
    """The user's own files behind a dotted target, by module name; {} if it is not the user's.

    Names, not places, identify the files. A missing module has none: importing it raises.
    """
    files: dict[str, Path] = {}
    package = _file_of(target.partition(".")[0])
    if package is not None and not is_own(package):
        return files
    waiting, seen = [*_with_parents(target)], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        file = _file_of(name)
        if file is not None and is_own(file):
            files[name] = file
            waiting += _imported(name, file)
    return files


def digest_of(content: bytes) -> str:
    """16 hex digits of sha256."""
    return hashlib.sha256(content).hexdigest()[:16]


def source_digest(target: str) -> str | None:
    """A digest of the user's own source behind a target; None if it is not the user's own."""
    files = sorted(source_files(target).items())
    parts = [f"{name}\0{digest_of(path.read_bytes())}\0" for name, path in files]
    return digest_of("".join(parts).encode()) if parts else None


def class_flag(target: str, name: str) -> bool | None:
    """The True or False that a user's class, or a base of it among the user's own, has by a name.

    Read in the syntax trees of the files that `source_files` names; None if none has it.

    Raises:
        UserError: the name is bound to anything else, or bases disagree.
    """
    files = source_files(target)
    classes: dict[str, ast.ClassDef] = {}
    # That of the target comes last, so that its classes win.
    for module in sorted(files, key=lambda name: len(name) * target.startswith(f"{name}.")):
        for node in _tree_of(files[module]).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
    class_name = target.rpartition(".")[2]
    try:
        return _flag_of(class_name, classes, name)
    except ValueError as error:
        raise UserError(
            f"_target_={target}: {name} {error}; write `{name} = True` or `{name} = False` in the "
            f"body of class {class_name} itself"
        ) from error


def _flag_of(class_name: str, classes: Mapping[str, ast.ClassDef], name: str) -> bool | None:
    """As `class_flag`, but raises ValueError."""
    found = classes.get(class_name)
    if found is None:
        return None
    # Python takes what was bound last.
    for node in reversed(found.body):
        if _binds(node, name):
            return _flag_in(node, name, class_name)
    others = {other: node for other, node in classes.items() if other != class_name}
    bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
    flags = {_flag_of(base, others, name) for base in bases} - {None}
    if len(flags) > 1:
        raise ValueError(f"is True in one base of class {class_name} and False in another")
    return flags.pop() if flags else None


def _binds(node: ast.stmt, name: str) -> bool:
    """True if a statement of a class body may give the class an attribute."""
    if isinstance(node, ast.AnnAssign) and node.value is None:  # a type alone
        return False
    try:
        table = symtable.symtable(ast.unparse(node), "", "exec")  # as in the body of a module
    except SyntaxError:  # importing it raises again
        return False
    if name not in table.get_identifiers():
        return False
    symbol = table.lookup(name)
    return symbol.is_assigned() or symbol.is_imported()


def _flag_in(node: ast.stmt, name: str, class_name: str) -> bool:
    """The True or False that a statement assigns to a name; raises ValueError for anything else."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    value = getattr(node, "value", None)
    is_named = any(isinstance(one, ast.Name) and one.id == name for one in targets)
    if is_named and isinstance(value, ast.Constant) and isinstance(value.value, bool):
        return value.value
    raise ValueError(f"cannot be read as True or False in class {class_name}")


def package_digest(target: str) -> str | None:
    """A digest of the Python files of the installed package behind a target.

    None for what is not installed: the user's own, normexp's and Python's modules.
    """
    files = filter(None, map(_file_of, _with_parents(target)))
    outermost = next(files, None)
    if outermost is None or not is_installed(outermost) or outermost.is_relative_to(PACKAGE):
        return None
    return _digest_of_package(outermost)


@cache  # as Python's own modules: what is installed later counts in the next process
def _digest_of_package(file: Path) -> str:
    folder = file.parent
    files = sorted(folder.rglob("*.py")) if file.name == "__init__.py" else [file]
    parts = []
    for path in files:
        name = path.relative_to(folder).as_posix()  # on Windows too
        parts.append(f"{name}\0{digest_of(path.read_bytes())}\0")
    return digest_of("".join(parts).encode())


# Digests of files by path, from before this process imported them. State of the process, as
# Python's own: it imports a module once, whatever becomes of its file.
_first_digests: dict[str, str] = {}


def refuse_edited(hashed: Mapping[str, str]) -> None:
    """Raises UserError if a file has changed since its digest, or since this process imported it.

    Args:
        hashed: digests of files by path, from when the id of a cell was computed.
    """
    for path, digest in hashed.items():
        if digest_of(Path(path).read_bytes()) != _first_digests.setdefault(path, digest):
            raise UserError(
                f"{path} was edited after the command began, or after this process imported it; "
                "run the command again, in a notebook after restarting its kernel"
            )


def why_missing(target: str) -> str:
    """Why a dotted target cannot be imported; empty if its files do not show it."""
    module, _, name = target.rpartition(".")
    top = target.partition(".")[0]
    if _find(top) is None:
        return f"there is no module {top}; install it, or set PYTHONPATH"
    file = _file_of(module or name)
    if file is None or file.suffix != ".py" or is_installed(file):
        return ""
    text = file.read_text(encoding="utf-8", errors="replace")
    if re.search(rf"\b({name}|__getattr__|globals|import \*)(?!\w)", text):
        return ""
    defined = re.findall(r"^(?:class|def) (\w+)", text, re.MULTILINE)
    fault = f"{module} has no {name}" if _find(target) is None else f"{target} is a module"
    if not defined:
        return fault
    return f"{fault}; {suggest(name, defined, most=3) or f'it has {name_some(defined)}'}"


def _file_of(name: str) -> Path | None:
    """The file of a module; None if it is missing, or a package without a file."""
    spec = _find(name)
    origin = spec.origin if spec is not None and spec.has_location else None
    return None if origin is None else Path(origin).resolve()


def _find(name: str) -> ModuleSpec | None:
    """The spec of a module, without importing its parents; None if there is none."""
    top, *rest = name.split(".")
    if top == "__main__":
        raise UserError(f"_target_={name}.*: put the class in a file, as my_file.MyNorm")
    try:
        spec = importlib.util.find_spec(top)  # of a top-level name: imports nothing
    except (ImportError, ValueError, AttributeError):  # a broken finder
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        folders = list(spec.submodule_search_locations)
        spec = PathFinder.find_spec(f"{spec.name}.{part}", folders)
    return spec


def _imported(module: str, path: Path) -> Iterator[str]:
    """The names of all modules that a file may import, and of their parents."""
    parents = module.split(".")
    for node in ast.walk(_tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base: list[str] = []
            if node.level:  # relative: from .a import b
                depth = len(parents) - node.level + (path.name == "__init__.py")
                base = parents[:depth]
            if node.module:
                base = [*base, node.module]
            for alias in node.names:  # the name may be a module
                yield from _with_parents(".".join([*base, alias.name]))


def _tree_of(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # importing it raises again; or a compiled module
        return ast.Module([], [])


def _with_parents(name: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` for the name `a.b.c`; nothing for a relative name."""
    parts = name.split(".")
    if parts[0]:
        for depth in range(1, len(parts) + 1):
            yield ".".join(parts[:depth])
