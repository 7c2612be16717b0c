"""Family `medusa`: a head per draft depth, which reads the last state of the target alone."""
