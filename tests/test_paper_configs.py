"""The paper's protocols: every file is what the training command and W&B accept, says what the paper says, and runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from jobs import ROOT, options, result, train_here
from safetensors.torch import load_file

from binmask_dist.method import graphs
from binmask_dist.sweeps import matching
from binmask_dist.training import checkpoints, closing_table, plots
from binmask_dist.training.config import TrainConfig, parse_config

PAPER = ROOT / "configs" / "paper"
SPARSIFY = sorted(PAPER.glob("sparsify_*.yaml"))
SWEEPS = sorted([*PAPER.glob("sweeps/*.yaml"), *PAPER.glob("small/*_*.yaml")])
LAMS = {1.6e-5, 8e-6, 4e-6, 2e-6, 1e-6, 1e-7, 0.0}


def trials(path: Path) -> list[TrainConfig]:
    """What trials of a sweep come to, by the parser of the command that it starts: every value is in one of them."""
    sweep = yaml.safe_load(path.read_text())
    assert sweep["program"] == "launch/train.py"
    assert sweep["method"] == "grid"
    command = sweep["command"]
    assert command[0] == "${env}"
    assert command[-1] == "${args}"
    arguments = [part for part in command[command.index("${program}") + 1 : -1]]
    values = {key: entry.get("values", [entry.get("value")]) for key, entry in sweep["parameters"].items()}
    found = []
    for place in range(max(map(len, values.values()))):
        given = options(**{key: choices[min(place, len(choices) - 1)] for key, choices in values.items()})
        found.append(parse_config([argument.replace("configs/", f"{ROOT}/configs/") for argument in arguments] + given))
    return found


def one_of_each_method(path: Path) -> list[TrainConfig]:
    return list({each.method: each for each in trials(path)}.values())


def test_the_protocol_of_sparsification() -> None:
    assert {path.stem for path in SPARSIFY} == {
        f"sparsify_{network}_{data}" for network in ("resnet32", "vgg19") for data in ("cifar10", "cifar100")
    }
    for path in SPARSIFY:
        config = parse_config(["--config", str(path)])
        network, data = path.stem.split("_")[1:]
        assert config.model == {"resnet32": "wide_resnet32", "vgg19": "vgg19_bn_32px"}[network]
        assert config.dataset == f"uoft-cs/{data}"
        assert (config.optimizer, config.momentum, config.lr, config.lr_final) == ("SGD", 0.9, 0.1, 0.0)
        assert (config.epochs, config.schedule, config.finetune_epochs) == (300, "cosine", 20)
        assert (config.mask_lr, config.mask_lr_final, config.warmup, config.alpha0) == (1e-3, 1e-5, 0.1, 0.3)
        by_method = {
            kind: trials(PAPER / "sweeps" / f"{path.stem}_{kind}.yaml") for kind in ("binmask", "dense", "probmask")
        }
        for kind, found in by_method.items():
            assert {each.method for each in found} == {kind}
            assert {each.seed for each in found} == {0, 1, 2, 3}
            assert {each.model for each in found} == {config.model}
        assert {each.lam for each in by_method["binmask"]} == LAMS
        assert len({each.target_sparsity for each in by_method["probmask"]}) == 7


def test_the_protocol_of_regularisation() -> None:
    config = parse_config(["--config", str(PAPER / "regularise.yaml"), "--dataset=x.npz"])
    assert (config.model, config.optimizer, config.epochs) == ("mlp_tanh", "adamw", 16)
    assert (config.lr, config.lr_final, config.weight_decay) == (2e-3, 5e-5, 0.01)
    assert (config.validation_fraction, config.test_fraction, config.split_by_seed) == (0.1, 0.15, True)
    assert (config.metric, config.patience) == ("auc", 16)
    for kind in ("binmask", "l1", "l2", "dropout", "logistic"):
        found = trials(PAPER / "sweeps" / f"regularise_{kind}.yaml")
        assert {each.method for each in found} == {kind}
        assert {each.seed for each in found} == set(range(8))
        assert len({each.lam for each in found}) == (1 if kind == "logistic" else 5)


def test_the_small_protocol_compares_all_methods() -> None:
    by_sweep = [trials(path) for path in PAPER.glob("small/sweep_*.yaml")]
    assert {each.method for found in by_sweep for each in found} == {
        "binmask",
        "dense",
        "probmask",
        "magnitude",
        "rigl",
    }
    for found in by_sweep:
        assert {each.seed for each in found} == {0, 1, 2}
        assert all(each.finetune_epochs for each in found)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_wandb_accepts_the_sweep(path: Path) -> None:
    schema = pytest.importorskip("sweeps")
    assert not schema.schema_violations_from_proposed_config(yaml.safe_load(path.read_text()))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images of 32 pixels with both data sets' label columns and classes, and as many to test on."""
    folder = tmp_path_factory.mktemp("images") / "data"
    pixels = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3), dtype=np.uint8)
    labels = [0, 1, 2, 3] * 2
    rows = {"img": list(pixels), "label": labels, "fine_label": labels}
    classes = {name: datasets.ClassLabel(num_classes=count) for name, count in (("label", 10), ("fine_label", 100))}
    features = datasets.Features({"img": datasets.Image(), **classes})
    part = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=part, test=part).save_to_disk(str(folder))
    return folder


FULL = sorted(PAPER.glob("sweeps/sparsify_*.yaml"))
CASES = [*((path, trials(path)[0]) for path in FULL)]
CASES += [(path, each) for path in sorted(PAPER.glob("small/sweep_*.yaml")) for each in one_of_each_method(path)]


def test_every_sweep_of_sparsification_is_run() -> None:
    assert len(FULL) == 12
    assert {config.method for _, config in CASES} == {"binmask", "dense", "probmask", "magnitude", "rigl"}


@pytest.mark.parametrize(("path", "config"), CASES, ids=lambda value: getattr(value, "stem", None) or value.method)
def test_it_runs(
    path: Path, config: TrainConfig, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps and one of fine-tuning, without what takes long with large networks and is tested elsewhere."""
    monkeypatch.setattr(graphs, "compilation_is_off", lambda: True)
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda *_: None)
    monkeypatch.setattr(closing_table, "WORTH_COMPRESSING", 0)
    monkeypatch.setattr(plots, "draw", lambda _: [])
    shorter = dict(batch_size=4, workers=0, epochs=2, steps_per_epoch=1, finetune_epochs=1, trackers=())
    here = dict(dataset=str(images), test_split="test", input_columns=("img",))
    here |= {"label_column": config.label_column or "label"}
    given = asdict(config) | shorter | here
    folder = train_here(tmp_path, "run", **{key: given[key] for key in given if key not in ("run_root", "name")})
    figures = result(folder)
    assert figures["method"] == config.method
    assert figures["steps"] == 3
    assert json.loads((folder / "config.json").read_text())["clip"] == config.clip
    classes = 100 if config.label_column == "fine_label" else 10
    saved = load_file(folder / "model" / "model.safetensors")
    assert any(tensor.shape[:1] == (classes,) for tensor in saved.values())
    assert 0 <= figures["before_finetuning"]["batch_statistics"]["test_accuracy"] <= 1
    if config.target_sparsity:
        assert figures["sparsity"] == pytest.approx(config.target_sparsity, abs=1e-3)


def test_other_methods_are_matched_to_binmask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def finished(name: str, sparsity: float, **config: Any) -> None:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "result.json").write_text(json.dumps({"sparsity": sparsity}))

    for seed in (0, 1):
        finished(f"a{seed}", 0.9 + 0.02 * seed, method="binmask", lam=1e-5, seed=seed)
        finished(f"b{seed}", 0.5, method="binmask", lam=1e-6, seed=seed)
    finished("other", 0.7, method="rigl", seed=0)
    finished("none", 0.0, method="binmask", lam=0.0, seed=0)
    sweep, out = PAPER / "small" / "sweep_probmask.yaml", tmp_path / "out.yaml"
    matching.main([str(tmp_path / "runs"), str(sweep), "--out", str(out)])
    assert {each.target_sparsity for each in trials(out)} == {0.5, 0.91}
    matching.main([str(tmp_path / "runs"), str(sweep), "--most", "1", "--out", str(out)])
    assert {each.target_sparsity for each in trials(out)} == {0.91}
    with pytest.raises(SystemExit):
        matching.main([str(tmp_path / "runs"), str(sweep), "--most", "-1", "--out", str(out)])
    assert "--most must be 0 or more, not -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        matching.main([str(PAPER), str(sweep), "--out", str(out)])
    assert "holds no finished run of BinMask" in capsys.readouterr().err
