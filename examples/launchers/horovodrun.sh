#!/usr/bin/env bash
# Starts ranks with Horovod's own launcher: examples/launchers/horovodrun.sh jobs/digits.yaml [options]
# `make horovod` installs it. Any strategy can be started this way; `horovod` also sums the gradients with Horovod.
set -euo pipefail
ranks=${RANKS:-4}
exec horizonml rendezvous -- \
  horovodrun -np "$ranks" --gloo horizonml train --set parallel.strategy=horovod "$@" --workers "$ranks"
