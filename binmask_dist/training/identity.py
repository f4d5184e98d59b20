"""Which trial a run is: a hash of what decides its result. Trials that differ in the seed alone are one configuration.

Takes configurations as config.json holds them, or as `dataclasses.asdict` makes them. What is at its default has no
part in the hash: an option that is new does not make other trials of those from before it. Nor has the launcher: the
number of processes, the engine, and the precision unless the configuration says it.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from binmask_dist.training.config import TrainConfig

# where a run is kept, how often it is saved, and who is told of it
NO_PART_OF_A_TRIAL = {"name", "run_root", "resume", "checkpoint_every", "keep_checkpoints", "workers", "log_every"}
NO_PART_OF_A_TRIAL |= {"trackers", "wandb_mode", "project", "group", "tags"}


def trial_id(config: Mapping[str, Any]) -> str:
    return digest(_settings(config), 12)


def configuration_id(config: Mapping[str, Any]) -> str:
    """The same for all seeds."""
    return digest({key: value for key, value in _settings(config).items() if key != "seed"}, 10)


def configuration_name(config: Mapping[str, Any]) -> str:
    """Some of the configuration to read, and the hash of all of it."""
    aim = f"lam{config['lam']:g}" if config["target_sparsity"] is None else f"target{config['target_sparsity']:g}"
    method = config.get("method", "binmask")
    if method in ("dense", "logistic"):
        aim = method
    elif method != "binmask":
        aim = f"{method}-{aim}"
    readable = f"{Path(config['dataset']).name}-{Path(config['model']).name}-{aim}"[:100]
    return f"{readable}-{configuration_id(config)}"


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = _defaults()
    given = {key: value for key, value in config.items() if key not in NO_PART_OF_A_TRIAL}
    return {key: value for key, value in given.items() if key not in defaults or _plain(value) != defaults[key]}


@functools.cache
def _defaults() -> dict[str, Any]:
    return _plain(asdict(TrainConfig()))


def _plain(value: Any) -> Any:
    """As JSON has it: a tuple is a list there."""
    return json.loads(json.dumps(value))


def digest(settings: dict[str, Any], length: int) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:length]
