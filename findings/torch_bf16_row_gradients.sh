#!/usr/bin/env bash
# torch adds the gradients of an embedding's row in bf16, and stops at 256.
#
# Version    torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   An item that occurs 4,096 times in a batch, with a gradient of 1 each, has a gradient of 4096,
#            which bf16 holds exactly. `sum` of as many ones is 4096, as it adds in float32.
# Behaviour  The backward of Embedding and EmbeddingBag, dense and sparse, `coalesce`, `index_add_` and
#            `segment_reduce` add in bf16: 256 + 1 is 256. `scatter_add_` and matrix products are exact.
#            With a vocabulary of popular items the busiest rows learn least, and nothing is said.
# Known      Not searched for upstream.
# What helps Weights of embeddings in float32 under autocast, whose gradients are float32. recspec trains
#            so.
#
# Output seen, 2026-11-28, Intel Xeon:
#
#   torch 2.13.0+cpu
#   /tmp/tmp.SvQKNM7w0b/check.py:21: UserWarning: Sparse invariant checks are implicitly disabled. Memory errors
#     (e.g. SEGFAULT) will occur when operating on a sparse tensor which violates the invariants, but checks incur
#     performance overhead. To silence this warning, explicitly opt in or out. See
#     `torch.sparse.check_sparse_tensor_invariants.__doc__` for guidance.  (Triggered internally at
#     /__w/pytorch/pytorch/aten/src/ATen/Context.cpp:816.)
#     "coalesce": torch.sparse_coo_tensor(rows[None], ones, (1,)).coalesce().values().item(),
#   sum 4096; scatter_add_ 4096; index_add_ 256; segment_reduce 256; coalesce 256; Embedding 256; Embedding, sparse
#     256; EmbeddingBag 256; Embedding, float32 4096
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import sys

import torch

print(f"torch {torch.__version__}")
kind, ones, rows = torch.bfloat16, torch.ones(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.long)


def gradient(layer, *given):
    layer(*given).sum().backward()
    held = layer.weight.grad
    return (held.coalesce().to_dense() if held.is_sparse else held)[0, 0].item()


bag = torch.nn.EmbeddingBag(2, 1, mode="sum", dtype=kind)
found = {
    "sum": ones.sum().item(),
    "scatter_add_": torch.zeros(1, dtype=kind).scatter_add_(0, rows, ones).item(),
    "index_add_": torch.zeros(1, dtype=kind).index_add_(0, rows, ones).item(),
    "segment_reduce": torch.segment_reduce(ones, "sum", lengths=torch.tensor([4096])).item(),
    "coalesce": torch.sparse_coo_tensor(rows[None], ones, (1,)).coalesce().values().item(),
    "Embedding": gradient(torch.nn.Embedding(2, 1, dtype=kind), rows),
    "Embedding, sparse": gradient(torch.nn.Embedding(2, 1, dtype=kind, sparse=True), rows),
    "EmbeddingBag": gradient(bag, rows, torch.arange(4096)),
    "Embedding, float32": gradient(torch.nn.Embedding(2, 1), rows),
}
print("; ".join(f"{what} {value:g}" for what, value in found.items()))
described = {name: 4096.0 if name in ("sum", "scatter_add_", "Embedding, float32") else 256.0 for name in found}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
