"""Models by name, from timm and transformers, and how they are saved so that their own library loads them."""

import difflib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import save_file
from timm.models import PretrainedCfg, load_model_config_from_hf, parse_model_name
from timm.models._hub import load_model_config_from_path
from torch import Tensor, nn

import binmask_dist.networks  # noqa: F401 - registers the paper's networks with timm
from binmask_dist.baselines.dropout import Dropout
from binmask_dist.files import replacing, write_atomically
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError, did_you_mean

TIMM_SOURCES = ("hf-hub:", "hf_hub:", "local-dir:")  # of models that are not in its own list
LOADERS: dict[str, Callable[[str], tuple[dict, str, dict]]] = {
    "hf-hub": load_model_config_from_hf,
    "local-dir": load_model_config_from_path,
}


def is_timm(name: str) -> bool:
    """Whether timm makes it; otherwise transformers is asked, if it looks like one of theirs."""
    if timm.is_model(name) or name.startswith(TIMM_SOURCES):
        return True
    if Path(name).is_dir() or "/" in name or _is_architecture(name):
        return False
    near = difflib.get_close_matches(name, timm.list_models(), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ", such as resnet18"
    raise RunError(f"model '{name}' is neither a folder here nor a name that timm knows{hint}")


class TimmModel(NamedTuple):
    """What timm knows of a model before it is made."""

    architecture: str
    arguments: dict[str, Any]  # that it was saved with
    pretrained: PretrainedCfg  # its input, and where weights are

    @classmethod
    def called(cls, name: str) -> "TimmModel":
        try:
            source, place = parse_model_name(name)
            if source is None:
                return cls(name, {}, timm.get_pretrained_cfg(name) or PretrainedCfg())
            about, architecture, arguments = LOADERS[source](place)
            return cls(architecture, arguments, PretrainedCfg(**about))
        except Exception as error:  # no such folder, no network, no config.json, an unknown tag, ...
            raise RunError(f"timm cannot find the model {name}: {first_line(error)}") from error


def make_timm(config: TrainConfig, arguments: dict[str, Any]) -> nn.Module:
    if config.method == "dropout":
        arguments = {**arguments, **Dropout.model_arguments(config.lam)}
    try:
        return timm.create_model(config.model, pretrained=config.pretrained, **arguments)
    except Exception as error:  # whatever the network's own code raises at arguments that it cannot take
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise RunError(f"timm cannot make {config.model} with {given}: {first_line(error)}") from error


def check_sizes(config: TrainConfig, **sizes: int) -> None:
    """Arguments of the model that follow from the data may be left out, but not be others."""
    for name, size in sizes.items():
        given = config.model_args.get(name, size)
        if given != size:
            raise RunError(f"model_args: {name} is {given!r}, but these data make it {size}; leave it out")


@contextmanager
def on_trial(model: nn.Module, problem: str) -> Iterator[None]:
    """To see what a new model answers, before anything is trained; if it raises, the problem is said.

    It stays as it is, and so does what the run is going to draw at random.
    """
    was_training = model.training
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model.eval()
            yield
    except Exception as error:  # whatever the network's own code raises
        raise RunError(f"{problem}: {first_line(error)}") from error
    model.train(was_training)


def is_whole(model: nn.Module) -> bool:
    """Whether all weights are here with their values: ZeRO-3 makes them in shards."""
    return not any(param.is_meta or hasattr(param, "ds_id") for param in model.parameters())


def save_timm(state: dict[str, Tensor], folder: Path, description: dict[str, Any]) -> list[Path]:
    """The weights under the model's own names, and what is needed to make the model and its input."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    with replacing(path) as temporary:
        # safetensors refuses weights that share memory: each gets its own, and both names are there to be loaded
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, temporary)
    write_atomically(folder / "model.json", json.dumps(description, indent=2) + "\n")
    return [path]


def transformers_config(config: TrainConfig, **settings: Any) -> Any:
    """The model's configuration, from the hub, a folder or, for a new model, the name of an architecture ("gpt2").

    `settings` are what the task needs; `model_args` are the user's, and must exist.
    """
    transformers = _transformers()
    try:
        if not config.pretrained and _is_architecture(config.model):
            made = transformers.AutoConfig.for_model(config.model, **config.model_args)
            known = transformers.AutoConfig.for_model(config.model)
        else:
            made = transformers.AutoConfig.from_pretrained(config.model, **config.model_args)
            known = made
    except Exception as error:  # no such folder, no network, no config.json, values that do not fit together, ...
        raise RunError(f"transformers cannot make the config of {config.model}: {first_line(error)}") from error
    for name in config.model_args:
        if not hasattr(known, name):
            hint = did_you_mean(name, known.to_dict())
            raise RunError(f"model_args: the config of {config.model} has no entry '{name}'{hint}")
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def named_classes(names: list[str]) -> dict[str, Any]:
    """What a transformers config says of classes; their number follows."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def make_transformers(auto_class: str, config: TrainConfig, model_config: Any) -> nn.Module:
    """`auto_class` is the name of one of transformers' Auto classes.

    The weights are fp32, in whatever precision they were stored: what is computed in less is the engine's business.
    """
    if config.method == "dropout":
        raise RunError("method dropout sets timm's drop_rate; for a transformers model use dense, with model_args")
    auto = getattr(_transformers(), auto_class)
    kind: dict[str, Any] = {"dtype": torch.float32}
    try:
        if config.pretrained:
            # a head for another number of classes is made anew
            return auto.from_pretrained(config.model, config=model_config, ignore_mismatched_sizes=True, **kind)
        return auto.from_config(model_config, **kind)
    except Exception as error:  # no weights, no network, an architecture without such a head, ...
        raise RunError(f"transformers cannot make {config.model} ({auto_class}): {first_line(error)}") from error


def load_tokenizer(config: TrainConfig) -> Any:
    name = config.tokenizer or config.model
    try:
        return _transformers().AutoTokenizer.from_pretrained(name)
    except Exception as error:  # as above
        if config.tokenizer:
            problem = f"there is no tokenizer {name}; give another name or folder"
        else:
            problem = f"there is no model {name} with a tokenizer; give another model, or tokenizer"
        raise RunError(f"{problem}: {first_line(error)}") from error


def check_fits(config: TrainConfig, model_config: Any, tokenizer: Any) -> None:
    """Texts that the model has no position or embedding for would fail in the middle of training."""
    vocabulary = getattr(model_config, "vocab_size", None)
    if vocabulary is None:
        raise RunError(f"{config.model} is no model of texts: its config has no vocab_size; give another model")
    positions = getattr(model_config, "max_position_embeddings", None) or 0  # -1 is no limit, too: XLNet says so
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit > 0]
    longest = min(limits, default=config.max_length)
    if config.max_length > longest:
        raise RunError(f"max_length {config.max_length} is more than the {longest} tokens that {config.model} takes")
    if len(tokenizer) > vocabulary:
        raise RunError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model knows {vocabulary}; "
            f"give another tokenizer or, for a new model, model_args: {{vocab_size: {len(tokenizer)}}}"
        )


def tie_again(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that are one in the model: gathered from shards they are two, and would be written twice."""
    seen: dict[int, Tensor] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: seen.setdefault(id(params[name]), tensor) if name in params else tensor for name, tensor in state.items()
    }


def save_transformers(model: Any, state: dict[str, Tensor], folder: Path, preprocessor: Any) -> list[Path]:
    """`save_pretrained` of the model and its tokenizer or image processor; every file is the old or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        model.save_pretrained(temporary, state_dict=state, save_original_format=False)
        preprocessor.save_pretrained(temporary)
        written = sorted(path for path in Path(temporary).rglob("*") if path.is_file())
        targets = [folder / path.relative_to(temporary) for path in written]
        for path, target in zip(written, targets, strict=True):
            target.parent.mkdir(exist_ok=True)
            with replacing(target) as part:
                os.replace(path, part)
    return [path for path in targets if path.suffix == ".safetensors"]


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _transformers() -> Any:
    """The module, which takes seconds to import, with bars only where somebody can see them move."""
    import transformers

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    return transformers


def _is_architecture(name: str) -> bool:
    """A folder of that name is what is meant, as it is by transformers."""
    return name in _transformers().CONFIG_MAPPING and not Path(name).is_dir()
