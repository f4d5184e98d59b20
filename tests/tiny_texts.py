"""Texts of a dozen words, and the smallest language models that read them."""

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["good", "bad", "film", "book", "very", "not", "it", "is", "a", "the"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def save_bert(folder: Path, **options: Any) -> Path:
    save_tokenizer(folder, "bert")
    transformers.BertConfig(**SMALL, vocab_size=16, max_position_embeddings=32, **options).save_pretrained(folder)
    return folder


def save_gpt2(folder: Path, **options: Any) -> Path:
    save_tokenizer(folder, "gpt")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 12}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, kind: str) -> None:
    special = {"gpt": ["<end>"], "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]}[kind]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[min(1, len(special) - 1)]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")  # type: ignore[assignment]
    names = {"eos_token": "<end>"}
    if kind == "bert":
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names
    )
    fast.save_pretrained(folder)


def write_reviews(path: Path) -> Path:
    random = np.random.default_rng(0)
    rows = []
    for index in range(48):
        words = [str(word) for word in random.choice(WORDS[2:], random.integers(1, 9))]
        kind = ("bad", "good")[index % 2]
        rows.append({"text": " ".join([*words, kind]), "other": "it is", "opinion": kind, "label": kind})
    Dataset.from_list(rows).to_json(path)
    return path


def write_book(path: Path) -> Path:
    lines = ["it is a good film", "the book is not bad", "", "very very good"] * 10
    path.write_text("".join(f"{line} \n" for line in lines))
    return path
