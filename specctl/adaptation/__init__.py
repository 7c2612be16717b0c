"""Drafters that go on learning while they draft: the stream of prompts, the feedback, the update rules."""
