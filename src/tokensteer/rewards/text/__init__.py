"""Rewards and constraints on text. Networks come from the `transformers` library, of the extra `hf`."""

from tokensteer.rewards.text.classifier import Classifier, classifier
from tokensteer.rewards.text.hub import decoder, load_tokenizer
from tokensteer.rewards.text.likelihood import Likelihood, likelihood
from tokensteer.rewards.text.onnx import bert_from_graph, bert_from_onnx
from tokensteer.rewards.text.renumbered import Renumbered, renumbered
from tokensteer.rewards.text.strings import OfText, finds, mentions, of_text, omits, word_count
from tokensteer.rewards.text.words import forbidden, lift, matching, required, spellings

__all__ = [
    "Classifier",
    "Likelihood",
    "OfText",
    "Renumbered",
    "bert_from_graph",
    "bert_from_onnx",
    "classifier",
    "decoder",
    "finds",
    "forbidden",
    "lift",
    "likelihood",
    "load_tokenizer",
    "matching",
    "mentions",
    "of_text",
    "omits",
    "renumbered",
    "required",
    "spellings",
    "word_count",
]
