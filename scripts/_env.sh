# Sourced by ./scripts/*: `make_env` leaves a finished .venv in $root, the repository.
# A marker names the pyproject.toml and the place that .venv was made for, so that a half-made,
# outdated or moved one is installed again.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python

say() { printf 'normexp: %s\n' "$*" >&2; }

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
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

is_ready() { [ "$(cat "$root/.venv/.normexp-ready" 2>/dev/null)" = "$(stamp)" ]; }

# An environment that somebody made otherwise is kept; one without pip gets it.
has_pip() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || return 1
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1
}

install() {
  local pip=("$python" -m pip --disable-pip-version-check)
  # uv is faster by minutes and reads no pip configuration, hence the index by hand.
  local index
  index=$("${pip[@]}" config get global.index-url 2>/dev/null) || index=${PIP_INDEX_URL:-}
  if "${pip[@]}" install --quiet uv &&
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index} \
      "$python" -m uv pip install --python "$python" -e "$root[test]"
  then
    return
  fi
  say "uv could not install it; trying pip"
  "${pip[@]}" install -e "$root[test]"
}

make_env() {
  is_ready && return
  (
    # One at a time, where the system has flock; the lock ends with this subshell.
    exec 9<"$root/pyproject.toml"
    if command -v flock >/dev/null; then flock 9 || true; fi
    is_ready && exit
    say "making .venv, once; this takes about a minute"
    rm -f "$root/.venv/.normexp-ready"
    if ! has_pip; then
      found=$(find_python) || exit 1
      "$found" -m venv --clear "$root/.venv" || exit 1
    fi
    install || exit 1
    stamp >"$root/.venv/.normexp-ready"
  ) >&2
}
