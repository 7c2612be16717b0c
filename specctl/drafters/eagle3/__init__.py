"""Family `eagle3`: a head on several hidden states of the target, trained on its own outputs (EAGLE-3 and 3.1)."""
