"""Experiments of the papers, each with a command of its own: recorded tables, prompt routers, lookahead reasoning."""
