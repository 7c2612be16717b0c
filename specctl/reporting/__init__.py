"""Pictures and tables of result documents: made from what result.json holds, and from nothing else."""
