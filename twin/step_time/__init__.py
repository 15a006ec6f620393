"""How long an engine step takes and how much memory a replica has."""
