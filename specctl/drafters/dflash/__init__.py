"""Family `dflash`: a head that drafts a block in one pass (DFlash, DSpark)."""
