#!/usr/bin/env bash
# Runs one of the launch commands on every node of a Slurm job, one process a node with all of its GPUs.
#
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh COMMAND.py [FLAG...]
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh generate.py --model=/data/flash --mesh=4x1x4 --prompt="The harbour"
#
# The processes find each other by Slurm's variables; process 0 is on the first node and listens at two ports that follow
# from the job's number (JAX_COORDINATOR_PORT chooses another pair). Submit it from the checkout's folder, which all nodes
# must see; PYTHON may name another interpreter than .venv/bin/python.
#
#SBATCH --job-name=dsv41-jax
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --no-requeue
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: sbatch --nodes=N launch/slurm.sh COMMAND.py [FLAG...]" >&2
    exit 2
fi
command=$1
shift

cd "${SLURM_SUBMIT_DIR:-.}"
# A process that dies ends the others by itself; Slurm's own signal comes to whatever is left.
exec srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" "launch/$command" "$@"
