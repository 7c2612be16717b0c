"""Choosing among drafters while decoding: policies, the game they play, feedback, recorded traces."""
