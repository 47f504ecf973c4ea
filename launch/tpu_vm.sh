#!/usr/bin/env bash
# Runs one of the launch commands on every host of a Cloud TPU slice, the same command on each.
#
#   launch/tpu_vm.sh NAME ZONE setup                     copy this checkout to every host and install it there
#   launch/tpu_vm.sh NAME ZONE run COMMAND.py [FLAG...]  run launch/COMMAND.py with these flags on every host
#   launch/tpu_vm.sh NAME ZONE stop                      end what `run` has left behind, e.g. after Ctrl-C here; a server
#                                                        drains first
#   launch/tpu_vm.sh NAME ZONE tunnel [PORT]             let this machine's PORT (8000) be the same one of the first host
#
#   launch/tpu_vm.sh my-v5p-64 us-east5-a run generate.py --model=/mnt/flash --mesh=16x1x4 --prompt="The harbour"
#   launch/tpu_vm.sh my-v6e-16 us-east5-b run serve.py --config=configs/serve_v6e16.py --model=/mnt/flash
#
# A server listens at the loopback of the first host, so that nobody but `tunnel` reaches it: http://127.0.0.1:8000.
# The hosts find each other by themselves (jax reads the slice's metadata). Process 0 listens at the ports 8482 and 8483,
# which the default network of a project leaves open between the hosts of a slice. The exit code is not 0 if any host's
# is not. Needs the gcloud command, logged in. GCLOUD_FLAGS may hold more flags for it, e.g. "--project=mine".
set -euo pipefail

usage() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
}

[[ $# -ge 3 ]] || usage
name=$1 zone=$2 action=$3
shift 3
read -ra more <<<"${GCLOUD_FLAGS:-}"
folder=dsv41-jax

everywhere() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all ${more[@]+"${more[@]}"} --command="$1"
}

case $action in
setup)
    root=$(cd "$(dirname "$0")/.." && pwd)
    archive=$(mktemp -d)/dsv41-jax.tar.gz
    trap 'rm -rf "$(dirname "$archive")"' EXIT
    git -C "$root" archive --format=tar.gz --output="$archive" HEAD # what is committed, the same on every host
    gcloud compute tpus tpu-vm scp "$archive" "$name:dsv41-jax.tar.gz" --zone="$zone" --worker=all \
        ${more[@]+"${more[@]}"}
    everywhere "rm -rf $folder && mkdir $folder && tar -xzf dsv41-jax.tar.gz -C $folder && cd $folder &&
        python3 -m venv .venv && .venv/bin/pip install -q -c .ci/constraints.txt -e '.[tpu,serve]'"
    ;;
run)
    [[ $# -ge 1 ]] || usage
    command=$1
    shift
    flags=""
    [[ $# -eq 0 ]] || flags=$(printf '%q ' "$@") # each flag arrives as it was given, spaces and quotes included
    everywhere "cd $folder && exec .venv/bin/python launch/$(printf '%q' "$command") $flags"
    ;;
stop)
    everywhere "pkill -TERM -f '[.]venv/bin/python launch/' || true"
    ;;
tunnel)
    port=${1:-8000}
    [[ $# -le 1 && $port =~ ^[0-9]+$ ]] || usage
    exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=0 ${more[@]+"${more[@]}"} \
        -- -N -L "127.0.0.1:$port:127.0.0.1:$port"
    ;;
*) usage ;;
esac
