"""`specctl train-router`: a classifier that picks a drafter from the prompt, beside the policies."""
