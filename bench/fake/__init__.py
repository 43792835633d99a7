"""Workers without a model, for benches of what stands before the model."""
