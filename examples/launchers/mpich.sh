#!/usr/bin/env bash
# Starts ranks with MPICH: examples/launchers/mpich.sh jobs/digits.yaml [options]
# HOSTS=a,b,c starts one rank on each of these machines, which need ssh, HorizonML in the same place, and the same token
# (`horizonml token` makes it here, and says which file to copy to the others).
set -euo pipefail
mpirun=$(command -v mpirun.mpich || command -v mpirun)
if [ -n "${HOSTS:-}" ]; then
  ranks=$(tr ',' '\n' <<<"$HOSTS" | wc -l)
  # Each rank reads the token from its machine's file: mpirun would send the environment over the network as it is.
  exec horizonml rendezvous --host 0.0.0.0 -- \
    env -u HORIZONML_TOKEN "$mpirun" -n "$ranks" -hosts "$HOSTS" horizonml train "$@" --workers "$ranks"
fi
ranks=${RANKS:-4}
exec horizonml rendezvous -- "$mpirun" -n "$ranks" horizonml train "$@" --workers "$ranks"
