"""Texts of two classes, and a small tokenizer for them."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from support.signals import optimiser_of, step

__all__ = (
    "TEXTS",
    "plain_losses",
    "small_bert",
    "small_distilbert",
    "small_words",
    "tokenizer_of_words",
    "write_reviews",
)

_WORDS = [
    "the",
    "a",
    "film",
    "plot",
    "was",
    "is",
    "good",
    "great",
    "bad",
    "dull",
    "and",
    "not",
    "very",
    "i",
    "loved",
    "hated",
    "it",
    "one",
    "two",
    "three",
    "four",
    "five",
]
TEXTS = ("the film was good", "a dull plot", "I loved it", "very very bad and not good")


def tokenizer_of_words(*more, pad="[PAD]"):
    """A tokenizer of whole words in lower case, as BERT's frames them."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = [pad, "[UNK]", "[CLS]", "[SEP]", *_WORDS, *more]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def write_reviews(path, rows=24, seed=0):
    """A Parquet file with the columns ``text``, ``title`` and ``label``; its texts."""
    draw = np.random.default_rng(seed)
    texts = [" ".join(draw.choice(_WORDS, draw.integers(1, 14))) for _ in range(rows)]
    table = pa.table(
        {"text": texts, "title": [f"review {row}" for row in range(rows)], "label": [row % 2 for row in range(rows)]}
    )
    pq.write_table(table, path, row_group_size=10)
    return texts


def small_bert(seed=0):
    """A BERT that classifies texts, with random weights."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    return BertForSequenceClassification(config)


def small_distilbert(seed=0):
    """A DistilBERT that classifies texts, with random weights."""
    import torch
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(seed)
    config = DistilBertConfig(vocab_size=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=64)
    return DistilBertForSequenceClassification(config)


def small_words():
    """A network of the user's own for texts, with random weights: the mean of its words, and three classes."""
    import torch

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.scores = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 3)

        def forward(self, input_ids, attention_mask):
            shown = attention_mask[..., None].to(torch.float32)
            return self.scores((self.words(input_ids) * shown).sum(1) / shown.sum(1))

    return Words()


def plain_losses(model, texts, labels, orders, tokens):
    """What a loop over the whole network loses on texts that are all padded to so many tokens."""
    import torch
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_words(), pad_token="[PAD]")
    optimiser, losses = optimiser_of(model), []
    for rows in orders:
        some = tokenizer([texts[row] for row in rows], padding="max_length", truncation=True, max_length=tokens)
        ids, mask = (torch.tensor(some[name]) for name in ("input_ids", "attention_mask"))
        losses.append(step(model(input_ids=ids, attention_mask=mask), torch.tensor(labels)[rows], optimiser))
    return losses
