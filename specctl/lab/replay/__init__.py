"""`specctl replay`: policies on a recorded table."""
