"""The engine alone, in one process without a network: cells, their bounds, and who is measured in them."""
