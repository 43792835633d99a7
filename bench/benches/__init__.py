"""One file for each bench; each has a BENCH."""
