"""Family `dflash`: a head that drafts a whole block in one pass (DFlash, DSpark)."""
