"""Drafters: their families, the directory that one is kept in, and the way from a name to one that drafts."""
