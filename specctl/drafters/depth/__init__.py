"""One head per draft depth: code shared by the families `hydra` and `medusa`."""
