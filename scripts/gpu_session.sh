#!/usr/bin/env bash
# ./scripts/gpu_session.sh PART OUT: what to do with a GPU, in parts that end within nine minutes.
#   check   the tests of a GPU and those of training, a training at norm batch 8, one interrupted
#   speed   the GPU rows of the bench, and a profile of 20 steps
#   study   experiment=cifar10_full, as far as the time goes; the next call continues. Needs $CIFAR, a
#           folder with train/ and test/. Packs OUT/runs.tar.gz, and writes all ended runs as a table,
#           OUT/cifar10_full.csv, which needs no records
# Writes to OUT as it goes. SMOKE=1: the same on a CPU, as small as can be. PYTHON: the interpreter,
# python3 if it is not set. Exit code: 1 if a step failed, which the others do not wait for.
set -u
part=${1:-} out=${2:-}
case $part in check | speed | study) ;; *) part= ;; esac
if [ -z "$part" ] || [ -z "$out" ]; then
  sed -n '2s/^# //p' "$0" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
mkdir -p "$out" && out=$(cd "$out" && pwd -P) || exit
cd "$root" || exit
export PYTHONPATH=$root/scripts:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3} smoke=${SMOKE:+1}
log=$out/$part.log
seconds=510 # of this part, after which a training is asked to stop
failed=0

say() { printf '%s %s\n' "$(date +%T)" "$*" | tee -a "$log"; }

# limited SECONDS COMMAND...: runs it into the log until then, or until the part ends. SIGINT lets
# normexp write a checkpoint.
limited() {
  local limit=$1 left=$((seconds - SECONDS)) code=0
  shift
  [ "$limit" -lt "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    say "no time left: $*"
    return 124
  fi
  say "$*"
  timeout --signal INT --kill-after 20 "$limit" "$@" >>"$log" 2>&1 || code=$?
  say "exit code $code"
  return "$code"
}

# The limits are those of a machine with a GPU; a CPU may be busy with other work.
[ -z "$smoke" ] || seconds=$((4 * seconds))
step() {
  local limit=$1
  shift
  limited $((smoke ? 4 * limit : limit)) "$@" || failed=1
}

if [ -n "$smoke" ]; then
  export OMP_NUM_THREADS=1 # on a busy machine threads of one small kernel wait for each other
  trainer=(trainer=cpu) data=(data=digits model=convnet data.limit_train=64)
else
  trainer=(trainer=gpu) data=(model=resnet20 data=image_folder "data.root=${CIFAR:-unset}")
fi

check() {
  # A warning that only this machine's torch or driver gives is printed, and fails nothing.
  local tests=(-p no:cacheprovider -q -m "not slow" -W default)
  local small=(data.limit_train=64 replicas=2)
  local batch8=(norm=batch norm_batch_size=8 batch_size=32 "evaluate_with=[running,precise]")
  batch8+=("runs_dir=$out/runs" study=check)
  local long=(norm=group "runs_dir=$out/runs" trainer.precision=32-true)
  if [ -n "$smoke" ]; then
    step 60 "$python" -m pytest "${tests[@]}" tests/gpu/test_gpu_steps.py -k "ghost or draws"
    batch8+=(epochs=1 "${small[@]}")
    long+=(steps=1200 val_every_epochs=200 "${small[@]}")
  else
    step 240 "$python" -m pytest "${tests[@]}" -n 8 tests/gpu
    step 150 "$python" -m pytest "${tests[@]}" -n 8 tests/training tests/batching tests/norms
    batch8+=(epochs=2 replicas=5)
    long+=(steps=8000 val_every_epochs=50 replicas=2)
  fi
  step 60 "$python" -m normexp.train "${trainer[@]}" "${batch8[@]}"
  # Interrupted after some seconds, resumed, and the same as one that was not.
  step 120 "$python" -m normexp.train "${trainer[@]}" "${long[@]}" study=whole
  limited "${INTERRUPT_AFTER:-12}" "$python" -m normexp.train "${trainer[@]}" "${long[@]}" study=cut
  step 120 "$python" -m normexp.train "${trainer[@]}" "${long[@]}" study=cut
  step 60 "$python" - "$out/runs" <<'PYTHON'
import sys
import normexp

whole, cut = (normexp.load_study(name, runs_dir=sys.argv[1]) for name in ("whole", "cut"))
names = [name for name in whole.columns if name.startswith(("val/", "test/"))]
for (_, a), (_, b) in zip(whole.iterrows(), cut.iterrows(), strict=True):
    for name in names:
        print(a["seed"], name, a[name], b[name], "equal" if a[name] == b[name] else "DIFFERENT")
assert len(whole) and names and whole[names].equals(cut[names]), "a resumed training ended differently"
PYTHON
}

speed() {
  local options=(--quick --only gpu --json "$out/bench.json")
  [ -z "$smoke" ] || options+=(--smoke)
  step 510 "$python" scripts/bench.py "${options[@]}"
}

study() {
  local words=(experiment=cifar10_full "${data[@]}" "${trainer[@]}" "runs_dir=$out/runs") code=0
  if [ -n "$smoke" ]; then
    words+=(epochs=1,2 replicas=2 batch_size=16 norm=batch,group norm_batch_size=2,16 lr=0.1,0.3)
  fi
  limited 510 "$python" -m normexp.train "${words[@]}" || code=$?
  case $code in
    0) ;;
    124 | 130) say "the next call of this part continues the study" ;;
    *) failed=1 ;;
  esac
  if [ -n "$(find "$out/runs" -name result.json -print -quit)" ]; then
    "$python" - "$out" >>"$log" 2>&1 <<'PYTHON' || failed=1
import sys
from pathlib import Path
import normexp

out = Path(sys.argv[1])
normexp.load_study("cifar10_full", runs_dir=out / "runs").to_csv(out / "cifar10_full.csv", index=False)
PYTHON
  fi
  tar -C "$out" --exclude weights.pt --exclude '*.ckpt' -czf "$out/runs.tar.gz" runs || failed=1
  say "packed $out/runs.tar.gz"
}

"$part"
exit "$failed"
