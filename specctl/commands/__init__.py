"""The drivers of the subcommands: every command's stages, in their order."""
