"""The LightningModules: optimizer steps in chunks, evaluation, checkpoints, what is logged."""
