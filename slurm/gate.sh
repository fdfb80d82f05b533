#!/usr/bin/env bash
# pageahead gate as a Slurm job after the others, for sites that submit by sbatch alone:
#
#   FOLDER=/shared/runs KIND=h200 sbatch --dependency=afterany:BENCH:VERIFY slurm/gate.sh
#
# FOLDER    where bench.sh and verify.sh left evidence; the verdict goes to KIND-gate.txt there
# KIND      kind of device
# STRATEGY  the candidate; needed where the evidence has several
# SETUP     a file to source first, such as .venv/bin/activate
# PYTHON    which has pageahead (default: python3)
#
# No GPU is needed. The job's exit status is the gate's: 0 for GO, 1 for NO-GO, 2 for INCOMPLETE.
#
#SBATCH --job-name=pageahead-gate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=10
#SBATCH --output=pageahead-%j.out

set -euo pipefail
: "${FOLDER:?says where evidence is}" "${KIND:?says what kind of device it is of}"

# shellcheck source=/dev/null
[ -z "${SETUP:-}" ] || . "$SETUP"
evidence=()
for one in "$FOLDER/$KIND-bench.jsonl" "$FOLDER/$KIND-verify.jsonl"; do
    [ ! -e "$one" ] || evidence+=("$one")
done
"${PYTHON:-python3}" -m pageahead gate ${STRATEGY:+--strategy "$STRATEGY"} "${evidence[@]}" "$@" |
    tee "$FOLDER/$KIND-gate.txt"
