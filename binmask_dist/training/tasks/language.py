"""Causal language modelling, by a model of transformers."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binmask_dist.training.columns import find_texts
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.data import Stream, finish_rows, load_data, map_batches
from binmask_dist.training.models import (
    check_fits,
    is_whole,
    load_tokenizer,
    make_transformers,
    on_trial,
    save_transformers,
    transformers_config,
)
from binmask_dist.training.tasks.base import Batch, RunError, Task

IGNORED = -100  # as a token to be predicted, to cross_entropy


class LanguageModelling(Task):
    """Texts, one after the other, are cut into blocks of max_length tokens; within a block each predicts the next."""

    metrics = ("loss", "perplexity")

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        data = load_data(config, labelled=False)
        (column,) = find_texts(data.features, config.input_columns, "", most=1)
        self.tokenizer = load_tokenizer(config)
        self.model_config = transformers_config(config)
        check_fits(config, self.model_config, self.tokenizer)
        pack_blocks = partial(pack, column=column, tokenizer=self.tokenizer, length=config.max_length)
        texts = (part.select_columns([column]) for part in (data.train, data.test))
        blocks = [map_batches(part, pack_blocks, [column]) for part in texts]
        for name, part in zip(("training", "test"), blocks, strict=True):
            if isinstance(part, datasets.Dataset) and len(part) == 0:
                raise RunError(f"the {name} split has no text in its column '{column}'")
        self.train, self.test = (
            Stream(part, config) if isinstance(part, datasets.IterableDataset) else part for part in blocks
        )

    def collate(self, examples: list) -> Batch:
        """The last block of a text may be shorter than the others."""
        examples = finish_rows(examples, dict, self.config.seed)
        blocks = [torch.tensor(example["input_ids"]) for example in examples]
        ones = [torch.ones_like(block) for block in blocks]
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return {"input_ids": pad(blocks), "attention_mask": pad(ones)}

    def learn(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, targets = self._predict(model, batch)
        smoothing = self.config.label_smoothing
        return {"loss": F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=smoothing)}

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, targets = self._predict(model, batch)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        return {"loss": losses.sum(dim=-1), "tokens": (targets != IGNORED).sum(dim=-1)}

    def _predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits with the classes second, as cross_entropy wants them, and the tokens to be predicted."""
        logits = model(**batch, use_cache=False).logits[:, :-1].float().transpose(1, 2)
        targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)[:, 1:]
        return logits, targets

    def summarise(self, rows: dict[str, Tensor]) -> dict[str, float | int]:
        """Over all predicted tokens, so that short blocks count for what they hold."""
        tokens = int(rows["tokens"].sum())
        loss = float(rows["loss"].double().sum()) / tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows
        return {"loss": loss, "perplexity": perplexity, "tokens": tokens, "examples": len(rows["tokens"])}

    def make_model(self) -> nn.Module:
        model = make_transformers("AutoModelForCausalLM", self.config, self.model_config)
        if is_whole(model) and self._looks_ahead(model):
            raise RunError(
                f"{self.config.model} sees the tokens that it is to predict; take a causal model such as gpt2, or give "
                "model_args: {is_decoder: true} if it has such an entry"
            )
        return model

    def _looks_ahead(self, model: nn.Module) -> bool:
        """Whether the last token of a text changes what is said before it: encoders such as BERT do that."""
        length = self.config.max_length
        batch = self.collate([{"input_ids": (self.test[0]["input_ids"] * length)[:length]}])  # none is longer
        other = batch["input_ids"].clone()
        other[:, -1] = (other[:, -1] + 1) % self.model_config.vocab_size
        name = self.config.model
        problem = f"{name} does not take blocks of {length} tokens; give another max_length, model or model_args"
        with on_trial(model, problem):
            before, after = (
                self._predict(model, {**batch, "input_ids": ids})[0] for ids in (batch["input_ids"], other)
            )
        # a process whose weights are still to come from another may answer NaN
        return not torch.allclose(before, after, equal_nan=True)

    def save_model(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> list[Path]:
        return save_transformers(model, state, folder, self.tokenizer)


def pack(rows: dict[str, list], column: str, tokenizer: Any, length: int) -> dict[str, list[list[int]]]:
    """Blocks of tokens from some texts. What cannot predict anything, a single token, is left out."""
    texts = [text for text in rows[column] if text]
    end = tokenizer.eos_token_id
    stream: list[int] = []
    for text, tokens in zip(texts, tokenizer(texts, verbose=False)["input_ids"] if texts else [], strict=True):
        stream += tokens
        # a line of a plain file keeps its line break: the text goes on in the next row
        if end is not None and not text.endswith("\n") and tokens[-1:] != [end]:
            stream.append(end)
    blocks = (stream[start : start + length] for start in range(0, len(stream), length))
    return {"input_ids": [block for block in blocks if len(block) > 1]}
