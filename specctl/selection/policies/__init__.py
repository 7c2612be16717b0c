"""Policies: bandits, Hedge and baselines, as functions of rewards or losses."""
