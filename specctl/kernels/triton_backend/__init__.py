"""Triton kernels for GPUs. `reference` documents the functions. They never synchronize with the host.

These kernels also run on a CPU in Triton's interpreter (TRITON_INTERPRET=1 before the import), where the tests compare
them with the reference. They use no libdevice and no autotuning.
"""

from ..reference import finite_rows as finite_rows  # one reduction
from .attention import attention as attention
from .distill import distill_rows as distill_rows
from .drafter_feedback import drafter_feedback as drafter_feedback
from .expand import expand_topk as expand_topk
from .layers import add_rms_norm as add_rms_norm
from .layers import rope_and_cache as rope_and_cache
from .layers import silu_and_mul as silu_and_mul
from .rows import argmax as argmax
from .rows import row_params as row_params
from .rows import sample_rows as sample_rows
from .rows import uniform as uniform
from .spans import span_attention as span_attention
from .spans import span_attention_backward as span_attention_backward
from .verify import accept_chain as accept_chain
from .verify import sample_tree as sample_tree
from .verify import walk_tree as walk_tree
