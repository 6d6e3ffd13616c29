"""Speed as ratios within one run, against the obvious way and against the physical limit."""
