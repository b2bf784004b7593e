"""Hard constraints: automata, regular expressions, and the look-ahead that keeps them satisfiable."""
