"""What `python -m bench transfer` is made of: streams of blocks, ucx_perftest, exposed transfers."""
