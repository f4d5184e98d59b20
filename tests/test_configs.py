"""Every ready config is one that Accelerate, or the training job, accepts, and says what its name says."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

from binmask_dist.training.config import TrainConfig, parse_config

CONFIGS = Path(__file__).parent.parent / "configs"
ACCELERATE = CONFIGS / "accelerate"


def load(name: str) -> ClusterConfig:
    return load_config_from_file(str(ACCELERATE / f"{name}.yaml"))


def test_all_are_there() -> None:
    names = {path.stem for path in ACCELERATE.glob("*.yaml")}
    assert names == {"cpu2", "ddp", "fsdp2", "zero1", "zero2", "zero3", "multi-node"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cpu2", DistributedType.MULTI_GPU),
        ("ddp", DistributedType.MULTI_GPU),
        ("fsdp2", DistributedType.FSDP),
        ("zero1", DistributedType.DEEPSPEED),
        ("zero2", DistributedType.DEEPSPEED),
        ("zero3", DistributedType.DEEPSPEED),
        ("multi-node", DistributedType.MULTI_GPU),
    ],
)
def test_the_launcher_accepts_it(name: str, kind: DistributedType) -> None:
    config = load(name)
    assert config.distributed_type == kind
    assert config.use_cpu == (name == "cpu2")
    assert config.num_processes == (16 if name == "multi-node" else 2)
    assert config.mixed_precision == "no"  # a string: YAML reads a bare no as false
    args = launch_command_parser().parse_args(["--config_file", str(ACCELERATE / f"{name}.yaml"), "script.py"])
    args, *_ = _validate_launch_command(args)
    assert args.use_deepspeed == (kind == DistributedType.DEEPSPEED)
    assert args.use_fsdp == (kind == DistributedType.FSDP)


def test_fsdp2() -> None:
    config = load("fsdp2").fsdp_config
    assert config["fsdp_version"] == 2
    assert config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage: int) -> None:
    config = load(f"zero{stage}").deepspeed_config
    assert config["zero_stage"] == stage
    assert config["gradient_clipping"] == 1e30  # left out, it would be 1.0
    assert config.get("zero3_save_16bit_model", False) == (stage == 3)


def test_multi_node() -> None:
    config = load("multi-node")
    assert (config.num_machines, config.machine_rank, config.rdzv_backend) == (2, 0, "static")
    assert config.main_process_ip
    assert config.main_process_port


def test_digits_is_the_default_job_spelt_out() -> None:
    path = CONFIGS / "train" / "digits.yaml"
    assert parse_config(["--config", str(path)]) == TrainConfig()
    spelt_out = yaml.safe_load(path.read_text())
    assert set(spelt_out) <= {option.name for option in fields(TrainConfig)}
    assert {"model", "epochs", "lam", "mask_lr"} <= set(spelt_out)
