"""Family `hydra`: one head per draft depth, which reads the tokens drafted before it."""
