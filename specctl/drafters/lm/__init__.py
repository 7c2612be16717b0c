"""Family `lm`: a small language model that drafts by itself."""
