#!/usr/bin/env bash
# Train on this host: on all its GPUs, or with two CPU processes where there is none.
#
#   launch/single_node.sh [--processes 8] [--engine ddp|fsdp2|zero1|zero2|zero3] [options of launch/train.py]
#
# PROCESSES and ENGINE in the environment do the same.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

processes=${PROCESSES:-} engine=${ENGINE:-ddp}
take_options "processes engine" "$@"

config=$(engine_config "$engine")
if [[ -z $processes ]]; then
    processes=$(count_gpus)
    ((processes)) || processes=2
fi
check_number "the number of processes" "$processes" 1 1024

# Port 0: any that is free, so that two runs on one host do not meet.
exec accelerate launch --config_file "$config" --num_machines 1 --num_processes "$processes" --main_process_port 0 \
    "$project/launch/train.py" "${train_options[@]}"
