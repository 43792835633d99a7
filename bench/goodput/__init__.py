"""Goodput of topologies side by side: the highest rate at which SLOs are kept."""
