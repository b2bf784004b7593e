"""Constraints as finite automata over tokens, sums and products of rewards. See also `rewards.text`, `rewards.image`
and `rewards.dna`."""

from tokensteer.rewards.combine import log_product as log_product
from tokensteer.rewards.combine import product as product
from tokensteer.rewards.combine import weighted as weighted
from tokensteer.rewards.constraints.automaton import Automaton as Automaton
from tokensteer.rewards.constraints.building import both as both
from tokensteer.rewards.constraints.building import either as either
from tokensteer.rewards.constraints.building import ended as ended
from tokensteer.rewards.constraints.building import minimal as minimal
from tokensteer.rewards.constraints.building import negate as negate
from tokensteer.rewards.constraints.conditioned import Conditioned as Conditioned
from tokensteer.rewards.constraints.conditioned import Constrained as Constrained
from tokensteer.rewards.constraints.grammar import grammar as grammar
from tokensteer.rewards.constraints.json_schema import json_pattern as json_pattern
from tokensteer.rewards.constraints.json_schema import read_json as read_json
from tokensteer.rewards.constraints.lookahead import LookAhead as LookAhead
from tokensteer.rewards.constraints.lookahead import Satisfies as Satisfies
from tokensteer.rewards.constraints.lookahead import constrain as constrain
from tokensteer.rewards.constraints.regex import regex as regex
from tokensteer.rewards.constraints.staying import Kept as Kept
from tokensteer.rewards.constraints.staying import kept as kept
from tokensteer.rewards.constraints.token_rules import avoids as avoids
from tokensteer.rewards.constraints.token_rules import contains as contains
from tokensteer.rewards.constraints.token_rules import count as count
from tokensteer.rewards.constraints.token_rules import fixed as fixed
