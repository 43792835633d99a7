"""A whole cluster in one process and in virtual time: for tests, and benches of decisions, not of speed."""
