"""Who gets the requests when all of them begin alike, on a real cluster with a tiny model."""
