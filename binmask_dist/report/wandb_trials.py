"""Trials from W&B, through its public API: what the training command logged there."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from tqdm import tqdm

from binmask_dist.report.trials import Record, Trials, Unusable, make_trial
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError

_PANELS = {"sparsity": "sparsity/overall", "train_loss": "train/epoch_loss"}
_PANELS |= {key: f"masks/{key}" for key in ("on_to_off", "off_to_on")}


def add_wandb_trials(trials: Trials, project: str, api: Any = None) -> None:
    """All runs of `entity/project`; those of which the server has no result are left out."""
    import wandb

    try:
        runs = (api or wandb.Api()).runs(project, lazy=False)
        total = len(runs)
    except (wandb.Error, ValueError) as error:
        raise RunError(f"W&B does not give the runs of {project}: {str(error).splitlines()[0]}") from None
    if not total:
        raise RunError(f"the W&B project {project} has no runs")
    bar: Iterable[Any] = tqdm(
        runs, total=total, unit="trial", desc="W&B", disable=None, leave=False, dynamic_ncols=True
    )
    for run in bar:
        source = f"wandb:{'/'.join(run.path)}"
        try:
            result = _plain(run.summary.get("result"))
            if not isinstance(result, dict) or not result:
                raise Unusable(f"is not finished: its state is {run.state}, and its summary has no result")
            config = _as_typed(run.config)
            trials.add(make_trial(source, config, result, _epochs(run, config, result)))
        except Unusable as error:
            trials.left_out.append((source, str(error)))
        except wandb.Error as error:
            trials.left_out.append((source, f"W&B does not give it: {str(error).splitlines()[0]}"))


def _epochs(run: Any, config: Record, result: Record) -> list[Record]:
    """Records as in metrics.jsonl; of an epoch that was logged again after a resume, the last one."""
    layers = list(result.get("layer_sparsity") or {})
    names = {**_PANELS, **{key: f"test/{key.removeprefix('test_')}" for key in result if key.startswith("test_")}}
    records: dict[int, Record] = {}
    for row in run.scan_history():
        if _PANELS["sparsity"] not in row:
            continue
        epoch = int(row["epoch"])
        record = {"epoch": epoch, "step": row.get("step"), **{key: row.get(name) for key, name in names.items()}}
        record["phase"] = "train" if epoch < config.get("epochs", 0) else "fine-tune"
        record["layer_sparsity"] = {name: row[f"layers/{name}"] for name in layers if f"layers/{name}" in row}
        records[epoch] = record
    return [records[epoch] for epoch in sorted(records)]


def _as_typed(config: Record) -> Record:
    """As in config.json, or it would be another configuration: W&B makes 0 of 0.0 and drops dicts that are empty."""
    floats = {option.name for option in fields(TrainConfig) if option.type in (float, float | None)}
    dicts: Record = {option.name: {} for option in fields(TrainConfig) if option.default_factory is dict}
    return {
        key: float(value) if key in floats and isinstance(value, int) else value
        for key, value in (dicts | _plain(dict(config))).items()
    }


def _plain(value: Any) -> Any:
    """W&B wraps nested dicts in classes of its own."""
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
