"""Family `hydra`: a head per draft depth, which reads the tokens drafted before it."""
