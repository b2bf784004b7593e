"""Constraints as finite automata over tokens, sums and products of rewards. See also `rewards.text`, `rewards.dna`."""

from tokensteer.rewards.combine import log_product as log_product
from tokensteer.rewards.combine import product as product
from tokensteer.rewards.combine import weighted as weighted
from tokensteer.rewards.constraints.automaton import Automaton as Automaton
from tokensteer.rewards.constraints.automaton import avoids as avoids
from tokensteer.rewards.constraints.automaton import both as both
from tokensteer.rewards.constraints.automaton import contains as contains
from tokensteer.rewards.constraints.automaton import count as count
from tokensteer.rewards.constraints.automaton import either as either
from tokensteer.rewards.constraints.automaton import fixed as fixed
from tokensteer.rewards.constraints.automaton import minimal as minimal
from tokensteer.rewards.constraints.automaton import negate as negate
from tokensteer.rewards.constraints.lookahead import Conditioned as Conditioned
from tokensteer.rewards.constraints.lookahead import Constrained as Constrained
from tokensteer.rewards.constraints.lookahead import Kept as Kept
from tokensteer.rewards.constraints.lookahead import LookAhead as LookAhead
from tokensteer.rewards.constraints.lookahead import Satisfies as Satisfies
from tokensteer.rewards.constraints.lookahead import constrain as constrain
from tokensteer.rewards.constraints.lookahead import kept as kept
from tokensteer.rewards.constraints.regex import regex as regex
