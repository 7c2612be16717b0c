"""Heads on the features of the target: what do several families share?"""
