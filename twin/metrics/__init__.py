"""From request records to the numbers people ask for."""
