# What the launch scripts share; they source it.
# shellcheck shell=bash

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# What `make install` made is used, unless another environment is active.
if [[ -z ${VIRTUAL_ENV:-} && -d $project/.venv ]]; then
    PATH=$project/.venv/bin:$PATH
fi

# A process that is told to stop saves first. The launcher would kill it after 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

fail() {
    echo "$0: error: $1" >&2
    exit 2
}

# take_options "nodes rank" "$@": --nodes and --rank set the variables of these names; all others are train.py's.
take_options() {
    local own=" $1 " option value
    shift
    train_options=()
    while (($#)); do
        option=${1%%=*}
        if [[ $option != --* || $own != *" ${option#--} "* ]]; then
            train_options+=("$1")
            shift
            continue
        elif [[ $1 == *=* ]]; then
            value=${1#*=}
            shift
        else
            (($# > 1)) || fail "$1 needs a value"
            value=$2
            shift 2
        fi
        printf -v "${option#--}" '%s' "$value"
    done
}

# check_number NAME VALUE FROM TO: VALUE is a whole number in that range.
check_number() {
    if ! [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3 || $2 > $4)); then
        fail "$1 must be a whole number from $3 to $4, not '$2'"
    fi
}

# engine_config NAME: the file with what accelerate is told about this engine.
engine_config() {
    local file=$project/configs/accelerate/$1.yaml
    [[ -f $file ]] || fail "there is no engine '$1'; take ddp, fsdp2, zero1, zero2 or zero3"
    echo "$file"
}

count_gpus() {
    python -c 'import torch; print(torch.accelerator.device_count())' ||
        fail "python cannot import torch; run 'make install', or activate the environment that has it"
}
