#!/usr/bin/env bash
# Ranks started by MPICH: examples/launchers/mpich.sh jobs/digits.yaml [options]
# With HOSTS=a,b,c (reached by ssh, HorizonML installed alike) one rank on each of these machines.
set -euo pipefail
mpirun=$(command -v mpirun.mpich || command -v mpirun)
if [ -n "${HOSTS:-}" ]; then
  ranks=$(tr ',' '\n' <<<"$HOSTS" | wc -l)
  exec horizonml rendezvous --host 0.0.0.0 -- \
    "$mpirun" -n "$ranks" -hosts "$HOSTS" horizonml train "$@" --workers "$ranks"
fi
ranks=${RANKS:-4}
exec horizonml rendezvous -- "$mpirun" -n "$ranks" horizonml train "$@" --workers "$ranks"
