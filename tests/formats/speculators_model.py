"""Run the EAGLE-3 model of `speculators` on an exported directory, with an interpreter that has the package.

argv: directory, input file (features [S, 3H], tokens [S], embedding [V, H], steps, row), output file (logits [steps,
Vd]).
"""

import sys

import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

directory, given, result = sys.argv[1:]
data = torch.load(given)
config = Eagle3SpeculatorConfig.from_pretrained(directory)
config.transformer_layer_config._attn_implementation = "eager"  # the default needs a compiler
model = Eagle3DraftModel.from_pretrained(directory, config=config, dtype=torch.float32).eval()
with torch.no_grad():
    model.embed_tokens.weight.copy_(data["embedding"])
found = []
model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0, data["row"]]))
with torch.no_grad():
    model(
        hidden_states=data["features"][None],
        input_ids=data["tokens"][None],
        document_ids=torch.zeros(1, len(data["tokens"]), dtype=torch.long),
        ttt_steps=data["steps"],
    )
torch.save(torch.stack(found), result)
