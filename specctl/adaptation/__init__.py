"""Online learning: drafters that keep learning while they draft, from a stream of prompts and the target's feedback."""
