"""The user's own source behind a target, found in syntax trees without importing anything.

Of a target in a package, the whole outermost package; of a target in a single file, that file; and
all of the user's own files that these import, with the `__init__` of their packages. Files of
normexp, of the standard library and in site-packages are not the user's own.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from normexp.errors import UserError

STANDARD_LIBRARY = Path(ast.__file__).parent


def source_files(target: str) -> dict[str, Path]:
    """The user's own files behind a dotted target, by module name; {} if it is not the user's.

    Names, not places, identify the files. A missing module has none: the error comes when it is
    imported.
    """
    files: dict[str, Path] = {}
    waiting = list(reversed(list(_with_parents(target))))
    tried: set[str] = set()
    is_target = True
    while waiting:
        name = waiting.pop()
        if name in tried:
            continue
        tried.add(name)
        file = _own_file(name)
        if file is None:
            continue
        members = {name: file}
        if is_target and (root := source_root(file)) is not None and root.is_dir():
            members |= _members_of(root, name, file)
            tried |= members.keys()
        is_target = is_target and not members
        for module, path in members.items():
            if path not in files.values():
                files[module] = path
                waiting += reversed(list(_imported(module, path)))
    return files


def refuse_without_file(key: str, target: str) -> None:
    """Raises UserError for a class of a notebook or of a program on stdin, which has no file."""
    name = target.partition(".")[0]
    module = sys.modules.get(name)
    if module is None or name in sys.stdlib_module_names - {"__main__"}:
        return
    file = getattr(module, "__file__", None)
    has_file = file is not None and Path(file).is_file()
    if not has_file and (name == "__main__" or getattr(module, "__spec__", None) is None):
        class_name = target.rpartition(".")[2]
        raise UserError(
            f"{key}._target_={target}: {name} has no file, so results could not be told from those "
            f"of an edit; put the class in a file, as {key}._target_=my_file.{class_name}"
        )


def why_missing(target: str) -> str:
    """Why a dotted target cannot be imported, as far as its files tell; empty if they do not."""
    module, _, name = target.rpartition(".")
    top = target.partition(".")[0]
    if top in sys.stdlib_module_names:
        return ""
    if _find(top) is None and top not in sys.modules:
        return f"there is no module {top}; install it, or add its folder to PYTHONPATH"
    file = _own_file(module or name)
    if file is None or file.suffix != ".py" or file.name == "__init__.py":
        return ""
    if not os.access(file, os.R_OK):
        return f"{file} cannot be read (permission denied)"
    defined, others = _names_in(_read(file))
    if name in others or hasattr(sys.modules.get(module), name) or "*" in others:
        return ""
    near = get_close_matches(name, defined, 3) or defined[:4]
    if not near:
        return f"{file.name} has no class and no function"
    if name == "py" or not module:
        return f"name a class or function in {file.name}, as {module or name}.{near[0]}"
    return f"{module} has no {name}; it has {', '.join(near)}"


def _names_in(source: bytes) -> tuple[list[str], set[str]]:
    """The classes and functions of a module, and all its names.

    The names hold `*` if its syntax does not tell them all.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # raised again by the import
        return [], {"*"}
    defined: list[str] = []
    names = {"*"} if b"globals()" in source else set()
    waiting: list[ast.AST] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.append("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting += reversed(list(ast.iter_child_nodes(node)))
    return [name for name in defined if name[0] not in "_*"], names.union(defined)


def digest_of_files(files: Mapping[str, Path]) -> str | None:
    """16 hex digits of sha256 over the names and bytes of files; None without files."""
    sha = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = _read(path)
        sha.update(f"{name}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:16] if files else None


def source_digest(target: str) -> str | None:
    """A digest of the user's own source behind a target; None if it is not the user's own."""
    return digest_of_files(source_files(target))


def digests_of(files: Mapping[str, Path]) -> dict[str, str]:
    """The digest of each file's content, by its path."""
    return {str(path): _digest(_read(path)) for path in files.values()}


# The user's own loaded modules: the spec, and the path and digest of the file when first seen.
_seen: dict[str, tuple[object, str, str]] = {}


def loaded_files() -> dict[str, str]:
    """The user's own files that this process has loaded, with the digest of each as it was loaded.

    A file may be edited after its import, which does not change this process. So a digest is of
    the content from when the module was first seen, and empty if its functions were other ones by
    then. A reloaded module has a new spec, and is read again.
    """
    for name, module in [*sys.modules.items()]:
        spec, file = (vars(module).get(key) for key in ("__spec__", "__file__"))
        if not isinstance(file, str) or name.partition(".")[0] in sys.stdlib_module_names:
            continue
        if name in _seen and _seen[name][0] is spec:
            continue
        if (path := _user_file(file)) is not None:
            content = _read(path)
            digest = _digest(content) if _is_loaded_from(module, file, content) else ""
            _seen[name] = spec, str(path), digest
    return {path: digest for name, (_, path, digest) in _seen.items() if name in sys.modules}


def _is_loaded_from(module: ModuleType, file: str, source: bytes) -> bool:
    """False if a function or method of a module is not in its source.

    Functions that a decorator replaced are not compared, nor constants of the module, nor modules
    that a loader rewrites.
    """
    if type(vars(module).get("__loader__")) is not SourceFileLoader:
        return True
    try:
        waiting = [compile(source, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):  # it was another source that was imported
        return False
    known = set()
    while waiting:
        code = waiting.pop()
        known.add(_fingerprint(code))
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
    classes = [c for c in vars(module).values() if isinstance(c, type)]
    members = [m for owner in (module, *classes) for m in vars(owner).values()]
    functions = [m for m in members if isinstance(m, FunctionType)]
    codes = [m.__code__ for m in functions if m.__code__.co_filename == file]
    return all(_fingerprint(code) in known for code in codes)


def _fingerprint(code: CodeType) -> tuple[object, ...]:
    """What a function does, wherever in its file it stands."""
    values = tuple(
        _fingerprint(c) if isinstance(c, CodeType) else repr(c)
        for c in code.co_consts
        if not isinstance(c, frozenset)  # in no fixed order
    )
    return code.co_qualname, code.co_code, code.co_names, code.co_varnames, values


@cache
def _user_file(file: str) -> Path | None:
    """The path of a module's file if it is the user's own; asked of thousands of modules."""
    path = Path(file)
    if is_installed(path):  # before links are followed, which takes time
        return None
    path = path.resolve()
    return path if path.is_file() and source_root(path) is not None else None


def refuse_edited(hashed: Mapping[str, str]) -> None:
    """Raises UserError if this process has loaded another content of a file than was hashed.

    Args:
        hashed: digests of files by path, from when the id of a cell was computed.
    """
    for path, digest in loaded_files().items():
        if hashed.get(path, digest) != digest:
            raise UserError(
                f"{path} was edited after the command began, or after this process imported it; "
                "run the command again, in a notebook after restarting its kernel"
            )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _members_of(root: Path, name: str, file: Path) -> dict[str, Path]:
    """Every module of the package in the folder `root`, which holds the module `name`."""
    parts = file.relative_to(root).with_suffix("").parts
    depth = len(parts) - (parts[-1] == "__init__")
    words = name.split(".")
    package = words[: len(words) - depth]
    members = {}
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root).with_suffix("").parts
        inner = inner[:-1] if inner[-1] == "__init__" else inner
        members[".".join([*package, *inner])] = path
    return members


def _own_file(name: str) -> Path | None:
    """The file of a module, if it is the user's own; None for a package without a file."""
    if name == "__main__":
        file = getattr(sys.modules[name], "__file__", None)
        path = None if file is None else Path(file).resolve()
        return path if path and path.is_file() and source_root(path) is not None else None
    spec = _find(name)
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    path = Path(spec.origin).resolve()
    return path if path.is_file() and source_root(path) is not None else None


def _find(name: str) -> ModuleSpec | None:
    """The spec of a module, without importing its parents; None if there is none."""
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)  # of a top-level name: imports nothing
    except (ImportError, ValueError, AttributeError):  # __main__, or a broken finder
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None or _is_foreign(spec):
            return None
        top = f"{top}.{part}"
        places = spec.submodule_search_locations
        specs = (finder.find_spec(top, places) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
    return spec


def _is_foreign(spec: ModuleSpec) -> bool:
    return spec.has_location and spec.origin is not None and is_installed(Path(spec.origin))


def _imported(module: str, path: Path) -> Iterator[str]:
    """The names of all modules that a file may import, and of their parents."""
    is_package = path.name == "__init__.py"
    for level, name in _import_statements(_read(path)) if path.suffix == ".py" else ():
        if level:
            parents = module.split(".")
            parents = parents[: len(parents) - level + is_package]
            name = ".".join([*parents, *([name] if name else [])])
        yield from _with_parents(name)


@lru_cache(maxsize=4096)
def _import_statements(content: bytes) -> tuple[tuple[int, str], ...]:
    """(level, dotted name) of each import in a source; level 0 is absolute."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # raised again by the import
        return ()
    imports: dict[tuple[int, str], None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= dict.fromkeys((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]  # may be modules
            imports |= dict.fromkeys((node.level, name) for name in (base, *names))
    return tuple(imports)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)) if parts[0])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # raised again by the import
        return b""


# --- Where it begins ------------------------------------------------------------------------------


def source_line_of(error: BaseException) -> str:
    """`" (file.py, line 3)"`, the line of the user's own code that raised; empty if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame
        for frame in frames
        if not Path(frame.filename).is_relative_to(STANDARD_LIBRARY)
        and source_root(Path(frame.filename)) is not None
    ]
    return (
        f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})"
        if user_frames
        else ""
    )


def source_root(module_file: Path) -> Path | None:
    """The user's own file, or the outermost package that holds it, helpers included.

    None for a file of normexp or in site-packages.
    """
    path = module_file.resolve()
    if path.is_relative_to(Path(__file__).resolve().parents[1]) or is_installed(path):
        return None
    while (path.parent / "__init__.py").is_file():
        path = path.parent
    return path


def digest_of_package(folder: Path) -> str:
    """16 hex digits of sha256 of the names and bytes of the Python files below a folder."""
    sha = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        sha.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:16]


def is_installed(path: Path) -> bool:
    """True for a file in site-packages, where a version number stands for the source."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
