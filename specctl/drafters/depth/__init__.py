"""Heads per draft depth: what do `hydra` and `medusa` share?"""
