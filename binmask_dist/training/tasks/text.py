"""Classification of texts, or of pairs of texts, by a model of transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from transformers import DataCollatorWithPadding

from binmask_dist.training.columns import find_texts
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.data import Stream, finish_rows, map_batches
from binmask_dist.training.models import (
    check_fits,
    check_sizes,
    is_whole,
    load_tokenizer,
    make_transformers,
    named_classes,
    on_trial,
    save_transformers,
    transformers_config,
)
from binmask_dist.training.tasks.base import Batch, RunError
from binmask_dist.training.tasks.classification import Classification


class TextClassification(Classification):
    """Texts are cut at max_length tokens, and those of a batch padded to the longest of them."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.columns = find_texts(self.data.features, config.input_columns, self.data.label, most=2)
        self.data.check_columns(self.columns)
        self.tokenizer = load_tokenizer(config)
        if self.tokenizer.pad_token is None:
            if self.tokenizer.eos_token is None:
                raise RunError("the tokenizer has neither a pad nor an eos token, and batches need one; give another")
            self.tokenizer.pad_token = self.tokenizer.eos_token
        check_sizes(config, num_labels=len(self.classes.names))
        self.model_config = transformers_config(
            config, pad_token_id=self.tokenizer.pad_token_id, **named_classes(self.classes.names)
        )
        check_fits(config, self.model_config, self.tokenizer)
        self.encode = partial(
            encode, columns=self.columns, label=self.data.label, tokenizer=self.tokenizer, max_length=config.max_length
        )
        self.pad = DataCollatorWithPadding(self.tokenizer)
        self.train = self._examples(self.data.train)
        self.test = self._examples(self.data.test)

    def _examples(self, part: Any) -> Any:
        part = part.select_columns([*self.columns, self.data.label])
        if isinstance(part, datasets.IterableDataset):
            return Stream(part, self.config)
        # a function rather than a method: `datasets` hashes it, with all it holds, to find its result again
        return map_batches(part, self.encode, self.columns)

    def collate(self, examples: list) -> Batch:
        examples = finish_rows(examples, self.encode, self.config.seed)
        names = self.tokenizer.model_input_names
        batch = dict(self.pad([{name: example[name] for name in names if name in example} for example in examples]))
        labels = [self.classes.number(example[self.data.label]) for example in examples]
        return batch | {"labels": torch.tensor(labels)}

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return model(**inputs).logits, batch["labels"]

    def make_model(self) -> nn.Module:
        model = make_transformers("AutoModelForSequenceClassification", self.config, self.model_config)
        if is_whole(model):
            self._try(model)
        return model

    def _try(self, model: nn.Module) -> None:
        """Many networks say only when they are used that texts are too long, or lack a token that they look for."""
        short = self.test[0]
        longest = self.encode({**short, **dict.fromkeys(self.columns, "a " * self.config.max_length)})
        batch = self.collate([longest, short])
        problem = (
            f"{self.config.model} does not take {self.config.max_length} tokens of this tokenizer; "
            "give another max_length, tokenizer, model or model_args"
        )
        with on_trial(model, problem):
            self.predict(model, batch)

    def save_model(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> list[Path]:
        return save_transformers(model, state, folder, self.tokenizer)


def encode(rows: dict[str, Any], columns: list[str], label: str, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """The tokens of a row, or of a batch of rows in columns; a missing text counts as an empty one."""
    texts = [
        [text or "" for text in rows[column]] if isinstance(rows[column], list) else rows[column] or ""
        for column in columns
    ]
    return {**tokenizer(*texts, truncation=True, max_length=max_length), label: rows[label]}
