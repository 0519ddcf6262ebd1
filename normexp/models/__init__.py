"""Networks that receive a NormFactory and never ask which norm it builds.

Your own network (`model=custom model._target_=my_pkg.MyNet`) is called with `norm` and with those
of input_shape, num_outputs, vocab_size and block_size that its signature names. It asks `norm(C)`
for the site of a map (N, C, *) and `norm.tokens(C)` for the site of tokens (B, T, C), and defines
forward(inputs), or forward(inputs, mask) for padded tokens. Where it has a place for what surrounds
a norm, it asks for that too: `norm.act(C)`, `norm.conv(...)` and the other slots.
"""
