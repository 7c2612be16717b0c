"""Training drafters: data, target features, the loop on a DeepSpeed engine, checkpoints."""
