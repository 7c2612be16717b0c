"""Family `eagle`: a head that drafts from the target's last hidden state (EAGLE-1, with the trees of EAGLE-2)."""
