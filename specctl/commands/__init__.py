"""Drivers of the subcommands: each one runs the stages of its command, in order."""
