#!/usr/bin/env bash
# Packs into .gpu/ what a GPU machine without a network lacks: wheels, CIFAR-10 and tinyshakespeare.
#   scripts/gpu/pack.sh CIFAR10_JPEG.tar.xz TINYSHAKESPEARE.txt [PYTHON with pip]
# The archive has train/<class>/ and test/<class>/. The machine is taken to have Python 3.12, torch and Lightning.
set -eu
cifar=$(realpath "${1:?the archive of CIFAR-10}") text=$(realpath "${2:?the text}") python=${3:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exclude=$(git rev-parse --git-path info/exclude)  # in a worktree .git is a file
grep -qx '/.gpu/' "$exclude" 2>/dev/null || { mkdir -p "${exclude%/*}"; echo '/.gpu/' >>"$exclude"; }
rm -rf .gpu; mkdir -p .gpu/wheels
tags=(--only-binary=:all: --python-version 3.12 --implementation cp)
for n in 2_28 2_27 2_17; do tags+=(--platform "manylinux_${n}_x86_64"); done
tags+=(--platform manylinux2014_x86_64)
get() { "$python" -m pip download -q --no-deps "${tags[@]}" -d .gpu/wheels "$@" 2>&1 | grep -v WARNING || true; }
get "hydra-core==1.3.*" "omegaconf==2.3.*" pydantic annotated-types typing-inspection babel "mlxtend==0.25.*"
# pydantic pins its core, and antlr4 is a source package.
core=$(unzip -p .gpu/wheels/pydantic-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core==//p')
get "pydantic-core==$core"
"$python" -m pip wheel -q --no-deps -w .gpu/wheels "antlr4-python3-runtime==4.9.3" 2>&1 | grep -v WARNING || true
[ "$(ls .gpu/wheels/*.whl | wc -l)" = 9 ] || { echo "not all nine wheels: $(ls .gpu/wheels)"; exit 1; }
cp "$cifar" .gpu/cifar10.tar.xz; cp "$text" .gpu/tinyshakespeare.txt
du -sh .gpu
