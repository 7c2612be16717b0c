"""Drafts read off text: the drafters `lookup` and `suffix`, and what `retrieval` shares with them."""
