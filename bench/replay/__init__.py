"""A trace replayed against a whole cluster in virtual time: what routing makes of the prefixes in it."""
