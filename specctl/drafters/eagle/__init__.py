"""Family `eagle`: a head that drafts from the last state of the target (EAGLE-1, with the trees of EAGLE-2)."""
