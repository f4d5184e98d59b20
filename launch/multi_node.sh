#!/usr/bin/env bash
# Train on several hosts. Start it once on each, in any order, with the same options but for the rank:
#
#   launch/multi_node.sh --nodes 2 --rank 0 --head 10.0.0.1 [--port 29500] [--processes 8]
#                        [--engine ddp|fsdp2|zero1|zero2|zero3] [options of launch/train.py]
#
# The head is the host with rank 0, by an address that all hosts reach. --processes is per host; without it there is one
# for each GPU, or one where there is none. NODES, NODE_RANK, HEAD_ADDRESS, HEAD_PORT, PROCESSES and ENGINE in the
# environment do the same; under SLURM the rank is SLURM_NODEID.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

nodes=${NODES:-} rank=${NODE_RANK:-${SLURM_NODEID:-}} head=${HEAD_ADDRESS:-} port=${HEAD_PORT:-29500}
processes=${PROCESSES:-} engine=${ENGINE:-ddp}
take_options "nodes rank head port processes engine" "$@"

[[ $nodes ]] || fail "the number of hosts is missing; give --nodes or set NODES"
check_number "--nodes" "$nodes" 1 100000
if ((nodes == 1)); then
    exec "$project/launch/single_node.sh" ${processes:+--processes "$processes"} --engine "$engine" "${train_options[@]}"
fi
[[ $rank ]] || fail "the rank of this host is missing; give --rank or set NODE_RANK, from 0 on the head to $((nodes - 1))"
check_number "--rank" "$rank" 0 $((nodes - 1))
[[ $head ]] || fail "the address of the host with rank 0 is missing; give --head or set HEAD_ADDRESS"
check_number "--port" "$port" 1 65535

config=$(engine_config "$engine")
if [[ -z $processes ]]; then
    processes=$(count_gpus)
    ((processes)) || processes=1
fi
check_number "--processes" "$processes" 1 1024

# Both would otherwise be looked up by this host's own name, which often means a loopback address.
route=$(python "$project/launch/route.py" "$head" "$port")
read -r address interface <<<"$route"
export PET_LOCAL_ADDR=${PET_LOCAL_ADDR:-$address} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}

# read_timeout: how long a host waits for a head that starts later. The head waits ten minutes for the others.
is_host=$( ((rank == 0)) && echo true || echo false)
exec accelerate launch --config_file "$config" --num_machines "$nodes" --num_processes $((nodes * processes)) \
    --machine_rank "$rank" --main_process_ip "$head" --main_process_port "$port" \
    --rdzv_backend c10d --rdzv_conf "is_host=$is_host,read_timeout=300" --deepspeed_multinode_launcher standard \
    "$project/launch/train.py" "${train_options[@]}"
