"""From the texts of a chunk to new weights: losses, update rules, ensembles, and who takes an update back."""
