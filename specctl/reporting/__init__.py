"""Pictures, tables and pages: made from result documents and run directories, and from nothing else."""
