"""Lookahead reasoning: a draft LM thinks ahead, the target writes too, a judge compares, the draft LM learns."""
