#!/usr/bin/env bash
# pageahead verify as a Slurm job, for sites that submit by sbatch alone:
#
#   FOLDER=/shared/runs KIND=h200 sbatch --gres=gpu:h200:1 --time=1:00:00 slurm/verify.sh
#
# FOLDER    where evidence (KIND-verify.jsonl) and logs go; all nodes must see it
# KIND      kind of device, by which evidence is named
# EXPECT    what the device's name must contain, or nothing is checked (default: KIND)
# SELECT, DEVICE    options of verify (default: all cells, auto)
# SETUP     a file to source first, such as .venv/bin/activate
# PYTHON    which has pageahead (default: python3)
#
# Further options of verify may follow the script's name. `pageahead slurm collect FOLDER` says how
# the job ended.
#
#SBATCH --job-name=pageahead-verify
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=pageahead-%j.out

set -euo pipefail
: "${FOLDER:?says where evidence goes}" "${KIND:?says what kind of device is checked}"
expect=${EXPECT:-$KIND}
case $KIND$expect in *[!A-Za-z0-9\ ._-]*) echo "KIND or EXPECT: only letters, digits, ' ._-'" >&2 && exit 2 ;; esac

mkdir -p "$FOLDER/logs"
log=$FOLDER/logs/$SLURM_JOB_ID
exec >>"${log}_0_log.out" 2>>"${log}_0_log.err"
# So that the job is known whatever fails from here on.
printf '{"kind":"started","time":"%s","job":"%s","device_kind":"%s","expected":"%s","command":["verify"],"evidence":"%s-verify.jsonl","node":"%s"}\n' \
    "$(date -u +%FT%T+00:00)" "$SLURM_JOB_ID" "$KIND" "$expect" "$KIND" "${SLURMD_NODENAME:-unknown}" \
    >>"${log}_journal.jsonl"

# shellcheck source=/dev/null
[ -z "${SETUP:-}" ] || . "$SETUP"
exec "${PYTHON:-python3}" -m pageahead slurm job --folder "$FOLDER" --device-kind "$KIND=$expect" \
    verify --device "${DEVICE:-auto}" ${SELECT:+--select "$SELECT"} "$@"
