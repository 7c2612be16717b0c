"""Family `peagle`: EAGLE-3's layer over all draft depths in one pass (P-EAGLE)."""
