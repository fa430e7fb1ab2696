"""Small programs with one kind of state each, and the list of them; `torpor conformance` runs them."""
