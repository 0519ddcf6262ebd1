# Sourced by ./scripts/*. `make_env` makes $root/.venv, where $root is the repository; `make_env test`
# adds what the tests need. A marker file in .venv, one for each of the two, holds the checksum of
# pyproject.toml and the path of the repository. Without a matching marker, .venv is unfinished,
# outdated or moved, and is installed again.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
case ${OSTYPE:-} in msys* | cygwin*) python=$root/.venv/Scripts/python ;; esac # bash on Windows

say() { printf 'normexp: %s\n' "$*" >&2; }

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python; do
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
    then
      echo "$name"
      return
    fi
  done
  say "needs Python 3.11 or newer with its venv module (Debian, Ubuntu: apt install python3-venv)"
  return 1
}

stamp() { echo "$(cksum <"$root/pyproject.toml") $root"; }

is_ready() { [ "$(cat "$root/.venv/.normexp-ready${1:+-$1}" 2>/dev/null)" = "$(stamp)" ]; }

# True if .venv has a suitable Python with pip; adds pip if it is missing. A .venv that was made by
# another tool is kept.
has_pip() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || return 1
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1
}

install() {
  local project=$root${1:+[$1]} pip=("$python" -m pip --disable-pip-version-check)
  # uv is faster by minutes. It ignores pip's configuration, so it is told pip's index.
  local index
  index=$("${pip[@]}" config get global.index-url 2>/dev/null) || index=${PIP_INDEX_URL:-}
  if "${pip[@]}" install --quiet uv &&
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index} \
      "$python" -m uv pip install --python "$python" -e "$project"
  then
    return
  fi
  say "uv could not install it; trying pip"
  "${pip[@]}" install -e "$project"
}

make_env() {
  local extra=${1:-}
  is_ready "$extra" && return
  (
    # One process at a time, if the system has flock; the lock ends with this subshell.
    exec 9<"$root/pyproject.toml"
    if command -v flock >/dev/null; then flock 9 || true; fi
    is_ready "$extra" && exit
    say "installing ${extra:+the packages of the tests }into .venv, once; this takes a minute or two"
    rm -f "$root"/.venv/.normexp-ready*
    if ! has_pip; then
      found=$(find_python) || exit 1
      "$found" -m venv --clear "$root/.venv" || exit 1
    fi
    install "$extra" || exit 1
    # Where Python may write no bytecode (PYTHONDONTWRITEBYTECODE), each process would otherwise
    # spend ten more seconds on importing torch. What is compiled already is left as it is.
    "$python" -m compileall -qq -j 0 "$root/.venv/lib" "$root/normexp" || true
    stamp | tee "$root/.venv/.normexp-ready" >"$root/.venv/.normexp-ready${extra:+-$extra}"
  ) >&2
}
