#!/usr/bin/env bash
# Starts ranks with Open MPI: examples/launchers/openmpi.sh jobs/digits.yaml [options]
# HOSTS=a,b,c starts one rank on each of these machines, which need ssh, HorizonML in the same place, and the same token
# (`horizonml token` makes it here, and says which file to copy to the others).
set -euo pipefail
mpirun=$(command -v mpirun.openmpi || command -v mpirun)
if [ -n "${HOSTS:-}" ]; then
  ranks=$(tr ',' '\n' <<<"$HOSTS" | wc -l)
  exec horizonml rendezvous --host 0.0.0.0 -- \
    "$mpirun" -np "$ranks" --host "$HOSTS" -x HORIZONML_RENDEZVOUS -x PATH horizonml train "$@" --workers "$ranks"
fi
ranks=${RANKS:-4}
exec horizonml rendezvous -- \
  "$mpirun" -np "$ranks" --oversubscribe --bind-to none horizonml train "$@" --workers "$ranks"
