"""Networks that receive a NormFactory and never ask which norm it builds.

Your own network (`model=custom model._target_=my_pkg.MyNet`) receives `norm`, and any of
input_shape, num_outputs, vocab_size and block_size that its signature names. It builds the norm of
maps (N, C, *) by `norm(C)`, that of tokens (B, T, C) by `norm.tokens(C)`, and defines
forward(inputs), or forward(inputs, mask) for padded tokens. It may also use the parts around a
norm: `norm.act(C)`, `norm.conv(...)` and the other slots.
"""
