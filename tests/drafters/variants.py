"""The EAGLE-3.1 options of `eagle3` heads, for the tests parametrized over them."""

NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
TRAINED = dict(norm_before_fc=True, norm_before_residual=True, norm_output=True, sliding_window=64)
"""What `speculators` trains by default, with a window that the tests' longer texts do not fit into."""
VARIANTS = {
    **{key: {key: True} for key in NORMS},
    "window": {"sliding_window": 64},
    "paper": {"fc_norm": True, "norm_output": True},
    "speculators": TRAINED,
    "layers": {"num_layers": 2},
    "layers as speculators": {"num_layers": 3, **TRAINED},
}
