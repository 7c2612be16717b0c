"""Family `peagle`: EAGLE-3's layer run over all draft depths in one pass (P-EAGLE)."""
