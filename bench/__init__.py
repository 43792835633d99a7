"""Measurements of a running Galley: `python -m bench` lists them."""
