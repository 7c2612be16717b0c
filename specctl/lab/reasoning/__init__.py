"""Lookahead reasoning: a draft LM writes steps ahead, the target writes its own, a judge compares them."""
