#!/usr/bin/env bash
# Ranks started by Horovod's own launcher: examples/launchers/horovodrun.sh jobs/digits.yaml [options]
# `make horovod` installs it. Any strategy can be started so; `horovod` uses Horovod for the gradients, too.
set -euo pipefail
ranks=${RANKS:-4}
exec horizonml rendezvous -- \
  horovodrun -np "$ranks" --gloo horizonml train --set parallel.strategy=horovod "$@" --workers "$ranks"
