#!/usr/bin/env bash
# Trains with RANKS ranks (2) on this machine: examples/horovod_tensorflow/run.sh [options of train.py]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${VENV:-$here/.venv}
export PYTHONPATH=$(cd "$here/../.." && pwd) PATH=$venv/bin:$PATH
# A script whose first line names an interpreter in a path with a space cannot be run by itself.
exec python "$venv/bin/horovodrun" -np "${RANKS:-2}" --gloo python "$here/train.py" "$@"
