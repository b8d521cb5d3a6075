"""The operations of the model, one family a file: the model calls only these."""

import os

# On some GPUs MLX multiplies f32 in TF32, ten bits of mantissa, unless told otherwise before the
# first product. Hyper-connections, router and norms are defined in f32 (docs/model.md, section 8).
os.environ.setdefault("MLX_ENABLE_TF32", "0")
