"""Rewards and constraints on text. Networks need the `transformers` library, extra `hf`."""

from tokensteer.rewards.text.classifier import Classifier as Classifier
from tokensteer.rewards.text.classifier import classifier as classifier
from tokensteer.rewards.text.hub import decoder as decoder
from tokensteer.rewards.text.hub import load_tokenizer as load_tokenizer
from tokensteer.rewards.text.likelihood import Likelihood as Likelihood
from tokensteer.rewards.text.likelihood import likelihood as likelihood
from tokensteer.rewards.text.onnx import bert_from_graph as bert_from_graph
from tokensteer.rewards.text.onnx import bert_from_onnx as bert_from_onnx
from tokensteer.rewards.text.renumbered import Renumbered as Renumbered
from tokensteer.rewards.text.renumbered import renumbered as renumbered
from tokensteer.rewards.text.strings import OfText as OfText
from tokensteer.rewards.text.strings import finds as finds
from tokensteer.rewards.text.strings import mentions as mentions
from tokensteer.rewards.text.strings import of_text as of_text
from tokensteer.rewards.text.strings import omits as omits
from tokensteer.rewards.text.strings import word_count as word_count
from tokensteer.rewards.text.words import forbidden as forbidden
from tokensteer.rewards.text.words import lift as lift
from tokensteer.rewards.text.words import matching as matching
from tokensteer.rewards.text.words import required as required
from tokensteer.rewards.text.words import spellings as spellings
