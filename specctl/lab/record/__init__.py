"""`specctl record`: the drafts of every drafter of a pool at every position, in a table."""
