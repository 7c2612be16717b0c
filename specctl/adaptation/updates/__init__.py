"""Updates on a chunk of texts: losses, update rules, ensembles, and a watchdog for rollbacks."""
