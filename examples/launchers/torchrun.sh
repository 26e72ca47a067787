#!/usr/bin/env bash
# Starts all ranks on this machine with torchrun: examples/launchers/torchrun.sh jobs/digits.yaml [options]
# On several machines, run torchrun on each, with --nnodes and --rdzv-endpoint as usual, and HORIZONML_RENDEZVOUS set to
# the host:port of one `horizonml rendezvous --host 0.0.0.0`. All of them need the same token: see `horizonml token`.
set -euo pipefail
ranks=${RANKS:-4}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec horizonml rendezvous -- torchrun --no-python --nproc-per-node "$ranks" horizonml train "$@" --workers "$ranks"
