#!/usr/bin/env bash
# What is to be known of a GPU in a few minutes of one: tests, rates, and trainings that go on where they were cut.
#   scripts/gpu/pack.sh ...                       at home; then, on the machine, in the repository's root:
#   TOTAL=560 scripts/gpu/gpu.sh                  seconds for everything; results in $OUT, at most 8 files
#   STAGES=figure TOTAL=130 scripts/gpu/gpu.sh    some of: tests rates figure norms; on a warm machine or with runs.tgz
#                                                 of the first call in .gpu/, the figure goes on
#   FORM="stack=false workers=6"                  how the figure's runs are trained; without it as `rates` found
#   DEVICE=cpu OUT=/tmp/o WORK=/tmp/w             the same on a CPU in tiny sizes, to test this script
# Each stage has a cap in seconds (TESTS_CAP and so on) and a process of its own; none stops the others.
set -u
END=$(( $(date +%s) + ${TOTAL:-540} )); cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
OUT=${OUT:-/tmp/out} WORK=${WORK:-/tmp/work} DEVICE=${DEVICE:-gpu} PY=${PY:-python3} STAGES=${STAGES:-tests rates figure}
runs=$WORK/runs data=$WORK/data; export OUT CIFAR=${CIFAR:-/tmp/cifar10} PYTHONUNBUFFERED=1  # the figure's records carry this root
export XDG_RUNTIME_DIR=$(mktemp -d); mkdir -p "$OUT" "$runs" "$data"; : >"$OUT/gpu.log"
say() { echo "$@" | tee -a "$OUT/gpu.log"; }; left() { echo $((END - $(date +%s))); }
wants() { case " $STAGES " in *" $1 "*) true ;; *) false ;; esac; }
# stage NAME CAP RESERVE COMMAND...: at most CAP seconds, and RESERVE stay for what comes later
stage() {
  local name=$1 cap=$2 room=$(( $(left) - $3 )) code=0 from=$(( $(wc -c <"$OUT/gpu.log") + 1 )) begin; shift 3
  [ "$cap" -le "$room" ] || cap=$room
  if [ "$cap" -lt 6 ]; then say "## $name: skipped, no time"; return; fi
  begin=$(date +%s)
  # To a file, not through a pipe: a process that outlives its stage must not hold the rest up.
  DEADLINE=$((begin + cap - 3)) timeout -k 8 "$cap" "$@" >>"$OUT/gpu.log" 2>&1 || code=$?
  tail -c "+$from" "$OUT/gpu.log" | tail -c 4000
  say "## $name: exit $code after $(( $(date +%s) - begin )) s, $(left) s left"
}

nvidia-smi 2>&1 | sed -n 3,10p | tee -a "$OUT/gpu.log"
if [ -d .gpu/wheels ] && ! $PY -c 'import hydra, pydantic' 2>/dev/null; then
  [ -d "$WORK/site/hydra" ] || $PY -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" .gpu/wheels/*.whl
  export PYTHONPATH=$WORK/site
fi
export PYTHONPATH=${PYTHONPATH:-}:$PWD:$PWD/scripts/gpu
$PY -m compileall -qq -j 0 "$WORK/site" normexp tests 2>/dev/null  # else every process of the tests compiles
cp -n .gpu/tinyshakespeare.txt "$data/" 2>/dev/null
(mkdir -p "$CIFAR" && [ -d "$CIFAR/test" ] || tar xJf .gpu/cifar10.tar.xz -C "$CIFAR") & unpacking=$!
[ -d "$runs/batch_size_cifar" ] || if [ -f .gpu/runs.tgz ]; then tar xzf .gpu/runs.tgz -C "$WORK"
  else $PY -m normexp.training.records.archive conf/experiment/records/batch_size_cifar.zip "$runs/batch_size_cifar"; fi

# Right? $OUT/tests.txt has each outcome as it happens. With pytest-timeout a hang ends its worker alone.
if wants tests; then
  chosen="-m gpu -n 14"; [ "$DEVICE" = gpu ] || chosen="-k draws_are"
  OMP_NUM_THREADS=1 PYTEST_TIMEOUT=60 stage tests "${TESTS_CAP:-90}" 200 $PY -m pytest tests/training -q $chosen --maxschedchunk=1 \
    --tb=short -p outcomes -p no:cacheprovider -W default -o timeout_method=thread
  cut -d" " -f2 "$OUT/tests.txt" | sort | uniq -c | tee -a "$OUT/gpu.log"
  grep " failed " "$OUT/tests.txt" | cut -c1-150 | head -25
fi
# Fast? The first call also decodes the images.
wait $unpacking
base="data_dir=$data trainer=$DEVICE"
wants rates && stage rates "${RATES_CAP:-100}" 90 $PY scripts/gpu/rates.py "$DEVICE" "$WORK/rates" "$base"
# Trained networks, in the fastest of the forms that were measured.
if wants figure; then
  form=${FORM:-$(cat "$OUT/form" 2>/dev/null || echo workers=3)}
  words="lr=1,0.1 norm=batch,group,layer,instance norm_batch_size=2,128,8,32 data.root=$CIFAR $base trainer.precision=32-true $form"
  [ "$DEVICE" = gpu ] || words="lr=1,0.1 norm=batch,group data.root=$CIFAR $base steps=2 data.limit_train=256 data.val_fraction=0.01 model.width=8 replicas=2 workers=2"
  say "the figure: $words"
  stage figure 600 14 $PY -m normexp.train experiment=batch_size_cifar runs_dir="$runs" $words
  tar czf "$OUT/runs.tgz" --exclude='*.pt' --exclude='*.ckpt' -C "$WORK" runs 2>/dev/null
fi
wants norms && stage norms "${NORMS_CAP:-200}" 4 $PY scripts/gpu/norms.py "$DEVICE"  # once the figure stands
ls -la "$OUT"
