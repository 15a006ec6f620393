"""What should be changed, and what it gives: comparisons, sweeps and searches over whole runs."""
